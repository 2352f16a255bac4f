"""One client's share: paid before it is made, made once, and the same again after a crash."""

import json
import math
import stat
from pathlib import Path

import numpy as np
import pytest
import torch

from clients.dafl import DaFl
from clients.generation import PrivateRecords
from clients.mean_embedding import MeanEmbedding
from clients.share import Client, Share, make_share, make_shares
from fl_sim.data import load
from fl_sim.types import UserError


def _records(client_class: int = 3) -> PrivateRecords:
    train = load("digits", None).train
    chosen = np.flatnonzero(train.labels == client_class)
    images = torch.from_numpy(train.inputs[chosen]).float() / 127.5 - 1
    return PrivateRecords(images, torch.from_numpy(train.labels[chosen].copy()), 10)


def _settings(**changes: object) -> DaFl:
    # The noise is secret, so labels are picked with so little of it that no outcome of these tests hangs on it.
    return DaFl.model_validate({"generator": "mean-embedding", "labels": "exponential:2", **changes})


def _charges(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()[1:]]


def _same(one: Share, other: Share) -> bool:
    return (
        torch.equal(one.inputs, other.inputs)
        and one.counts.tolist() == other.counts.tolist()
        and (one.refused, one.facts) == (other.refused, other.facts)
    )


def test_a_share_holds_as_many_records_as_were_picked_sorted_by_class(tmp_path: Path) -> None:
    share = make_share(_settings(gamma=0.1), _records(), 0, tmp_path / "0", seed=0, public_records=1437)
    assert share.inputs.shape == (int(share.counts.sum()), 1, 8, 8)
    assert share.counts.argmax() == 3
    assert abs(int(share.counts[3]) - 0.1 * len(_records().labels)) < 15
    assert -1 <= float(share.inputs.min()) <= float(share.inputs.max()) <= 1


def test_both_releases_are_on_the_ledger_before_the_generator_sees_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def looking(self, records, counts, bill, noise, generator):  # type: ignore[no-untyped-def]
        seen.extend(charge["release"] for charge in _charges(tmp_path / "0"))
        return torch.zeros(int(counts.sum()), 1, 8, 8)

    monkeypatch.setattr(MeanEmbedding, "generate", looking)
    make_share(_settings(), _records(), 0, tmp_path / "0", seed=0, public_records=1437)
    assert seen == ["labels", "generator"]


def test_a_second_call_hands_out_the_same_share_and_pays_nothing(tmp_path: Path) -> None:
    first = make_share(_settings(), _records(), 0, tmp_path / "0", seed=0, public_records=1437)
    paid = _charges(tmp_path / "0")
    assert _same(first, make_share(_settings(), _records(), 0, tmp_path / "0", seed=0, public_records=1437))
    assert _charges(tmp_path / "0") == paid


def test_a_client_that_was_killed_makes_the_same_release_again_with_the_key_it_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.Tensor] = []
    generate = MeanEmbedding.generate

    def killed(self, *arguments):  # type: ignore[no-untyped-def]
        made.append(generate(self, *arguments))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(MeanEmbedding, "generate", killed)
        with pytest.raises(KeyboardInterrupt):
            make_share(_settings(), _records(), 0, tmp_path / "0", seed=0, public_records=1437)
    assert stat.S_IMODE((tmp_path / "0" / "key").stat().st_mode) == 0o600
    paid = _charges(tmp_path / "0")
    share = make_share(_settings(), _records(), 0, tmp_path / "0", seed=0, public_records=1437)
    assert torch.equal(share.inputs, made[0])
    assert _charges(tmp_path / "0") == paid
    assert not (tmp_path / "0" / "key").exists()


def test_secret_noise_differs_between_clients_and_runs_and_seeded_noise_between_clients_alone(tmp_path: Path) -> None:
    def share(noise: str, folder: str, client: int) -> torch.Tensor:
        return make_share(
            _settings(noise=noise, gamma=1.0), _records(), client, tmp_path / folder, seed=0, public_records=1437
        ).inputs[:20]

    assert not torch.equal(share("secret", "a", 0), share("secret", "b", 0))
    assert torch.equal(share("seeded", "c", 0), share("seeded", "d", 0))
    assert not torch.equal(share("seeded", "e", 0), share("seeded", "f", 1))


def test_a_client_with_too_few_records_releases_nothing_pays_nothing_and_says_so(tmp_path: Path) -> None:
    few = _records()
    for number in (0, 1, 2):
        records = PrivateRecords(few.inputs[:number], few.labels[:number], 10)
        share = make_share(
            _settings(epsilon=0.2, labels="exponential:0.1"), records, 0, tmp_path / "0", seed=0, public_records=1437
        )
        assert len(share.inputs) == share.counts.sum() == 0
        assert share.refused
        assert not (tmp_path / "0").exists()


def test_epsilon_inf_is_the_control_without_noise(tmp_path: Path) -> None:
    records = _records()
    share = make_share(_settings(epsilon=math.inf, gamma=0.1), records, 0, tmp_path / "0", seed=0, public_records=1437)
    assert share.counts.tolist() == [0, 0, 0, round(0.1 * len(records.labels)), *[0] * 6]
    assert [charge["epsilon"] for charge in _charges(tmp_path / "0")] == [None, None]


def test_labels_that_use_up_the_budget_are_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"preprocess.epsilon = 0.1 is used up by the labels \(0.1\)"):
        make_share(
            _settings(epsilon=0.1, labels="exponential:0.1"), _records(), 0, tmp_path / "0", seed=0, public_records=1437
        )


def test_clients_whose_generators_train_together_release_what_each_would_alone(tmp_path: Path) -> None:
    settings = _settings(noise="seeded", gamma=0.1, generator={"kind": "dp-cgan", "discriminator_steps": 5})
    few = PrivateRecords(_records().inputs[:0], _records().labels[:0], 10)
    clients = [Client(0, _records(3), tmp_path / "0"), Client(1, few, tmp_path / "1")]
    clients += [Client(7, _records(8), tmp_path / "7")]
    together = make_shares(settings, clients, seed=0, public_records=1437)
    assert [bool(share.refused) for share in together if isinstance(share, Share)] == [False, True, False]
    assert [charge["release"] for charge in _charges(tmp_path / "7")] == ["labels", "generator"]
    for client, found in zip(clients, together, strict=True):
        assert isinstance(found, Share)
        folder = tmp_path / "alone" / str(client.number)
        assert _same(found, make_share(settings, client.records, client.number, folder, seed=0, public_records=1437))


def test_clients_that_were_killed_together_make_the_same_releases_again_whoever_is_left(tmp_path: Path) -> None:
    settings = _settings(gamma=0.1, generator={"kind": "dp-cgan", "discriminator_steps": 5})
    clients = [Client(number, _records(number), tmp_path / str(number)) for number in (0, 1)]

    def killed() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_shares(settings, clients, seed=0, public_records=1437, check=killed)
    paid = [_charges(client.folder) for client in clients]
    keys = [(client.folder / "key").read_bytes() for client in clients]
    first = make_share(settings, clients[0].records, 0, clients[0].folder, seed=0, public_records=1437)
    for client, key in zip(clients, keys, strict=True):  # killed once more, between its release and its answer
        (client.folder / "share.safetensors").unlink(missing_ok=True)
        (client.folder / "key").write_bytes(key)
    again, _ = make_shares(settings, clients, seed=0, public_records=1437)
    assert isinstance(again, Share)
    assert _same(first, again)
    assert [_charges(client.folder) for client in clients] == paid


def test_what_one_client_raises_is_not_the_others(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "share.safetensors").write_bytes(b"not a share")
    clients = [Client(number, _records(number), tmp_path / str(number)) for number in (0, 1)]
    broken, whole = make_shares(_settings(), clients, seed=0, public_records=1437)
    assert isinstance(broken, Exception)
    assert isinstance(whole, Share)

"""One client's share: paid before it is made, made once, and the same again after a crash."""

import json
import math
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import dp_event

from clients.dafl.dpcgan.training import GanClient
from clients.dafl.generator import PrivateRecords
from clients.dafl.labels import ExponentialMechanism
from clients.dafl.noisy_moments import MeanEmbedding
from clients.dafl.settings import DaFl
from clients.dafl.share import ReleasingClient, SyntheticShare, make_shares
from fl_sim.data import load
from fl_sim.errors import RunError, UserError
from fl_sim.privacy.accounting import epsilon_of_counts
from fl_sim.privacy.events import from_json


def _records(client_class: int = 3) -> PrivateRecords:
    train = load("digits", None).train
    chosen = np.flatnonzero(train.labels == client_class)
    images = torch.from_numpy(train.inputs[chosen]).float() / 127.5 - 1
    return PrivateRecords(images, torch.from_numpy(train.labels[chosen].copy()), 10)


def _settings(**changes: object) -> DaFl:
    # The noise is secret, so labels are picked with so little of it that no outcome of these tests hangs on it.
    generator = {"kind": "mean-embedding", "frequencies": 8}
    return DaFl.model_validate({"generator": generator, "labels": "exponential:2", **changes})


def make_share(settings: DaFl, client: ReleasingClient, *, seed: int, public_records: int) -> SyntheticShare:
    [share] = make_shares(settings, [client], seed=seed, public_records=public_records)
    if isinstance(share, Exception):
        raise share
    return share


def _client(records: PrivateRecords, folder: Path, number: int = 0) -> ReleasingClient:
    return ReleasingClient(number, records, folder, _ledger(folder))


def _ledger(folder: Path) -> Path:
    return folder.parent / "ledgers" / f"{folder.name}.jsonl"


def _charges(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in _ledger(folder).read_text().splitlines()[1:]]


def _released(folder: Path) -> list[str]:
    return [str(charge["release"]).split()[0] for charge in _charges(folder)]


def _same(one: SyntheticShare, other: SyntheticShare) -> bool:
    return (
        torch.equal(one.inputs, other.inputs)
        and one.counts.tolist() == other.counts.tolist()
        and (one.refused, one.facts) == (other.refused, other.facts)
    )


def test_a_share_holds_as_many_records_as_were_picked_sorted_by_class(tmp_path: Path) -> None:
    share = make_share(_settings(gamma=0.1), _client(_records(), tmp_path / "0"), seed=0, public_records=1437)
    assert share.inputs.shape == (int(share.counts.sum()), 1, 8, 8)
    assert share.counts.argmax() == 3
    assert abs(int(share.counts[3]) - 0.1 * len(_records().labels)) < 15
    assert -1 <= float(share.inputs.min()) <= float(share.inputs.max()) <= 1


def test_both_releases_are_on_the_ledger_before_the_generator_sees_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def looking(self, records, counts, bill, noise, generator):  # type: ignore[no-untyped-def]
        seen.extend(_released(tmp_path / "0"))
        return torch.zeros(int(counts.sum()), 1, 8, 8)

    monkeypatch.setattr(MeanEmbedding, "generate", looking)
    make_share(_settings(), _client(_records(), tmp_path / "0"), seed=0, public_records=1437)
    assert seen == ["labels", "generator"]


def test_a_second_call_hands_out_the_same_share_and_pays_nothing(tmp_path: Path) -> None:
    first = make_share(_settings(), _client(_records(), tmp_path / "0"), seed=0, public_records=1437)
    paid = _charges(tmp_path / "0")
    assert _same(first, make_share(_settings(), _client(_records(), tmp_path / "0"), seed=0, public_records=1437))
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
            make_share(_settings(), _client(_records(), tmp_path / "0"), seed=0, public_records=1437)
    assert stat.S_IMODE((tmp_path / "0" / "key").stat().st_mode) == 0o600
    paid = _charges(tmp_path / "0")
    share = make_share(_settings(), _client(_records(), tmp_path / "0"), seed=0, public_records=1437)
    assert torch.equal(share.inputs, made[0])
    assert _charges(tmp_path / "0") == paid
    assert not (tmp_path / "0" / "key").exists()


def test_secret_noise_differs_between_clients_and_runs_and_seeded_noise_between_clients_alone(tmp_path: Path) -> None:
    def share(noise: str, folder: str, client: int) -> torch.Tensor:
        return make_share(
            _settings(noise=noise, gamma=1.0),
            _client(_records(), tmp_path / folder, client),
            seed=0,
            public_records=1437,
        ).inputs[:20]

    assert not torch.equal(share("secret", "a", 0), share("secret", "b", 0))
    assert torch.equal(share("seeded", "c", 0), share("seeded", "d", 0))
    assert not torch.equal(share("seeded", "e", 0), share("seeded", "f", 1))


def test_a_client_with_too_few_records_releases_nothing_pays_nothing_and_says_so(tmp_path: Path) -> None:
    few = _records()
    for number in (0, 1, 2):
        records = PrivateRecords(few.inputs[:number], few.labels[:number], 10)
        share = make_share(
            _settings(epsilon=0.2, labels="exponential:0.1"),
            _client(records, tmp_path / "0"),
            seed=0,
            public_records=1437,
        )
        assert len(share.inputs) == share.counts.sum() == 0
        assert share.refused
        assert not (tmp_path / "0").exists()


def test_epsilon_inf_is_the_control_without_noise(tmp_path: Path) -> None:
    records = _records()
    share = make_share(
        _settings(epsilon=math.inf, gamma=0.1), _client(records, tmp_path / "0"), seed=0, public_records=1437
    )
    assert share.counts.tolist() == [0, 0, 0, round(0.1 * len(records.labels)), *[0] * 6]
    assert [charge["epsilon"] for charge in _charges(tmp_path / "0")] == [None, None]


def test_labels_that_use_up_the_budget_are_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"preprocess.epsilon = 0.1 is used up by the labels \(0.1\)"):
        make_share(
            _settings(epsilon=0.1, labels="exponential:0.1"),
            _client(_records(), tmp_path / "0"),
            seed=0,
            public_records=1437,
        )


def test_clients_whose_generators_train_together_release_what_each_would_alone(tmp_path: Path) -> None:
    settings = _settings(noise="seeded", gamma=0.1, generator={"kind": "dp-cgan", "discriminator_steps": 5})
    few = PrivateRecords(_records().inputs[:0], _records().labels[:0], 10)
    clients = [_client(_records(3), tmp_path / "0"), _client(few, tmp_path / "1", 1)]
    clients += [_client(_records(8), tmp_path / "7", 7)]
    together = make_shares(settings, clients, seed=0, public_records=1437)
    assert [bool(share.refused) for share in together if isinstance(share, SyntheticShare)] == [False, True, False]
    assert _released(tmp_path / "7") == ["labels", "generator"]
    for client, found in zip(clients, together, strict=True):
        assert isinstance(found, SyntheticShare)
        folder = tmp_path / "alone" / str(client.number)
        assert _same(
            found, make_share(settings, _client(client.records, folder, client.number), seed=0, public_records=1437)
        )


def test_clients_that_were_killed_together_make_the_same_releases_again_whoever_is_left(tmp_path: Path) -> None:
    settings = _settings(gamma=0.1, generator={"kind": "dp-cgan", "discriminator_steps": 5})
    clients = [_client(_records(number), tmp_path / str(number), number) for number in (0, 1)]

    def killed() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_shares(settings, clients, seed=0, public_records=1437, check=killed)
    paid = [_charges(client.folder) for client in clients]
    keys = [(client.folder / "key").read_bytes() for client in clients]
    first = make_share(settings, _client(clients[0].records, clients[0].folder, 0), seed=0, public_records=1437)
    for client, key in zip(clients, keys, strict=True):  # killed once more, between its release and its answer
        (client.folder / "share.safetensors").unlink(missing_ok=True)
        (client.folder / "key").write_bytes(key)
    again, _ = make_shares(settings, clients, seed=0, public_records=1437)
    assert isinstance(again, SyntheticShare)
    assert _same(first, again)
    assert [_charges(client.folder) for client in clients] == paid


def test_what_one_client_raises_is_not_the_others(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "share.safetensors").write_bytes(b"not a share")
    clients = [_client(_records(number), tmp_path / str(number), number) for number in (0, 1)]
    broken, whole = make_shares(_settings(), clients, seed=0, public_records=1437)
    assert isinstance(broken, Exception)
    assert isinstance(whole, SyntheticShare)


def test_labels_are_picked_after_they_were_paid_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    select, seen = ExponentialMechanism.select, []

    def looking(self, *arguments):  # type: ignore[no-untyped-def]
        seen.extend(_released(tmp_path / "0"))
        return select(self, *arguments)

    monkeypatch.setattr(ExponentialMechanism, "select", looking)
    make_share(_settings(), _client(_records(), tmp_path / "0"), seed=0, public_records=1437)
    assert seen == ["labels", "generator"]


def test_the_ledger_is_charged_every_step_of_the_generator(tmp_path: Path) -> None:
    settings = _settings(generator={"kind": "dp-cgan", "discriminator_steps": 5})
    make_share(settings, _client(_records(), tmp_path / "0"), seed=0, public_records=1437)
    bill = settings.generator.bill(len(_records().labels), 10, settings.generator_epsilon(10), settings.delta)
    charged = [from_json(charge["event"]) for charge in _charges(tmp_path / "0")]
    assert charged == [settings.labels.event(10), dp_event.SelfComposedDpEvent(bill.event, 5)]
    assert epsilon_of_counts({charged[1]: 1}, settings.delta) > 1.2 * epsilon_of_counts({bill.event: 1}, settings.delta)


def test_the_range_of_the_label_picker_is_that_of_the_whole_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A range that follows the client's own counts tells them: some outcome is possible in one world alone.
    select, ranges = ExponentialMechanism.select, []

    def looking(self, held, gamma, largest, noise):  # type: ignore[no-untyped-def]
        ranges.append(largest)
        return select(self, held, gamma, largest, noise)

    monkeypatch.setattr(ExponentialMechanism, "select", looking)
    for number in (3, 8):
        few = PrivateRecords(_records(number).inputs[:90], _records(number).labels[:90], 10)
        for records in (few, _records(number)):
            folder = tmp_path / f"{number} {len(records.labels)}"
            make_share(_settings(gamma=0.1), _client(records, folder), seed=0, public_records=1437)
    assert ranges == [144] * 4


def test_a_new_share_about_the_same_records_is_paid_on_the_same_ledger(tmp_path: Path) -> None:
    def make(**changes: object) -> None:
        client = ReleasingClient(0, _records(), tmp_path / f"{len(list(tmp_path.iterdir()))}", _ledger(tmp_path / "0"))
        make_share(_settings(**changes), client, seed=0, public_records=1437)

    make()
    make()  # its folder, and so its key, was lost: other noise, another release
    make(epsilon=5.0)
    make(noise="seeded")
    make(noise="seeded")  # the same noise, the same bits: the same release
    make(noise="seeded", gamma=0.2)  # the same noise, but another release
    assert _released(tmp_path / "0") == ["labels", "generator"] * 5


def test_a_share_whose_ledger_does_not_hold_what_it_was_paid_with_is_not_handed_out(tmp_path: Path) -> None:
    def make() -> SyntheticShare:
        return make_share(_settings(), _client(_records(), tmp_path / "0"), seed=0, public_records=1437)

    make()
    ledger = _ledger(tmp_path / "0")
    whole = ledger.read_bytes()
    for broken in (None, b"", b"".join(whole.splitlines(keepends=True)[:2]), whole.replace(b"labels", b"Labels")):
        ledger.unlink() if broken is None else ledger.write_bytes(broken)
        with pytest.raises((RunError, UserError), match=r"0\.jsonl"):
            make()
    ledger.write_bytes(whole)
    make()


@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * 1000, b"\x08\0\0\0\0\0\0\x7f{}", None])
def test_a_damaged_share_or_key_is_named_in_one_sentence_and_never_used(tmp_path: Path, content: bytes | None) -> None:
    client = _client(_records(), tmp_path / "0")
    make_share(_settings(), client, seed=0, public_records=1437)
    share = tmp_path / "0" / "share.safetensors"
    share.write_bytes(share.read_bytes()[:-4] if content is None else content)
    with pytest.raises(RunError, match=r"share\.safetensors is damaged: delete it"):
        make_share(_settings(), client, seed=0, public_records=1437)
    share.unlink()
    (tmp_path / "0" / "key").write_bytes(content or b"")
    with pytest.raises(RunError, match=r"key is damaged: delete it; .* charged again"):
        make_share(_settings(), client, seed=0, public_records=1437)


def test_what_a_client_keeps_is_readable_by_nobody_else(tmp_path: Path) -> None:
    make_share(_settings(), _client(_records(), tmp_path / "clients" / "0"), seed=0, public_records=1437)
    kept = [path for path in tmp_path.rglob("*") if not path.name.endswith(".lock")]
    assert {path.name for path in kept} == {"clients", "0", "share.safetensors", "ledgers", "0.jsonl"}
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in kept} == {0}


def test_the_words_of_an_unforeseen_error_stay_with_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise ValueError("record 17 is [0.3, 0.7]")

    for place, name in (ExponentialMechanism, "select"), (MeanEmbedding, "generate"), (GanClient, "chosen"):
        kind = "dp-cgan" if place is GanClient else "mean-embedding"
        with monkeypatch.context() as patched:
            patched.setattr(place, name, failing)
            with pytest.raises(RunError) as caught:
                make_share(_settings(generator=kind), _client(_records(), tmp_path / name), seed=0, public_records=1437)
        assert str(caught.value) == "making synthetic records failed with ValueError, whose message may quote records"

"""What compression goes together with: every algorithm, aggregator and attack is refused with its reason, or runs."""

from functools import partial
from typing import Any

import pytest
import torch

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.packed import Packing
from fl_sim.params import FlatParams, flattened, layout_of
from fl_sim.privacy.mechanisms import Noise, clip_factor
from fl_sim.settings import kinds_of
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import read_rounds
from fl_sim.types import Cohort, Payloads, Reply
from strategies.algorithm import payload_template
from strategies.compression.error_feedback import RandK
from strategies.global_dp import GlobalDP

ON_AVERAGE = {"rand-k": "rand-k:0.3", "qsgd": "qsgd"}
WITH_FEEDBACK = {"top-k": "top-k:0.3", "powersgd": "powersgd", "signsgd": "signsgd"}
REFUSED = {
    "ifca": "in a special format",
    "cfl": "lengths and directions of the updates",
    **dict.fromkeys(("depthfl", "heterofl", "fedrolex"), "models of one size"),
    "fedexp": "squared norm of the mean update",
    "flora": "multiplies the factors",
    "flexlora": "multiplies the factors",
    "rolora": "factors B in odd rounds",
    "centralized": "send no updates",
    "pate": "send no updates",
    "tstr": "send no updates",
    "afl": "send no updates",
    "fedpft": "send no updates",
}
SUMS = ("global-dp", "distributed-dp", "distributed-dp-sgd", "secure-sum")
DRIFTS = ("scaffold", "feddyn", "fedspeed")
"""Algorithms of which the server and its clients add up the same updates, each for itself."""


def settings(compress: Any, **others: Any) -> Any:
    table = {
        "partition": "iid", "clients": 4, "model": "logistic", "rounds": 2, "compress": compress,
        "local": {"learning_rate": 0.05}, "engine": {"kind": "inprocess", "workers": 1},
    }  # fmt: skip
    return experiment_from({**table, **others})


def test_every_kind_is_here() -> None:
    assert {"none", *ON_AVERAGE, *WITH_FEEDBACK} == set(kinds_of("compress"))


@pytest.mark.parametrize("algorithm", kinds_of("algorithm"))
def test_every_algorithm_runs_or_is_refused_with_the_reason(algorithm: str, tmp_path: Any) -> None:
    for kind, compress in {**ON_AVERAGE, **WITH_FEEDBACK}.items():
        reason = REFUSED.get(algorithm, "drift apart" if algorithm in DRIFTS and kind in ON_AVERAGE else "")
        if reason:
            with pytest.raises(UserError, match=f"{reason}.*(leave|take)") as raised:
                settings(compress, algorithm=algorithm)
            assert "\n" not in str(raised.value)
    if algorithm in REFUSED:
        return
    if not hasattr(kinds_of("algorithm")[algorithm], "sends"):
        run(settings("top-k:0.3", algorithm=algorithm), tmp_path)
        assert read_rounds(tmp_path)[-1].test_accuracy > 0.2
        return
    if algorithm in {"local-only", "fedproto-local", "fd", "fedgh", "fedmd", "fedtgp"}:
        with pytest.raises(UserError, match="whose clients send no parameters: leave compress out"):
            run(settings("top-k:0.3", algorithm=algorithm, model="mlp"), tmp_path)
        return
    own = {"clients": "class-shares"}  # the server's model is no client's
    result = run(settings("top-k:0.3", algorithm=algorithm, model="mlp", evaluate=own, rounds=5), tmp_path)
    assert result["personal"]["trained_accuracy"] > 0.2


def test_rand_k_with_error_feedback_goes_with_what_must_not_drift() -> None:
    for algorithm in DRIFTS:
        settings({"kind": "rand-k", "correction": "error-feedback"}, algorithm=algorithm)


@pytest.mark.parametrize("aggregator", sorted(set(kinds_of("aggregator")) - {"mean", *SUMS}))
def test_robust_aggregators_look_at_what_was_unpacked_or_are_refused(aggregator: str, tmp_path: Any) -> None:
    robust = {"aggregator": {"kind": aggregator}, "clients": 8}
    run(settings("qsgd", **robust), tmp_path / "qsgd")
    if aggregator not in {"median", "trimmed-mean", "bulyan", "bucketing"}:
        run(settings("top-k:0.3", **robust), tmp_path / "top-k")
        return
    for compress in ("top-k", "rand-k"):
        with pytest.raises(UserError, match="the middle value is 0"):
            settings(compress, **robust)


def test_sums_on_a_grid_are_refused() -> None:
    with pytest.raises(UserError, match=r"distributed-dp.*compress"):
        settings("qsgd", aggregator={"kind": "distributed-dp", "epsilon": 8.0})


def test_hostile_clients_send_what_travels() -> None:
    for attack in ("label-flip", "sign-flip"):
        settings("top-k", attack=attack)
    with pytest.raises(UserError, match="its forged updates have no compressed form"):
        settings("qsgd", attack="alie")


def test_batch_norm_layers_travel_whole_beside_a_compressed_update(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "normed.py").write_text(
        "from torch import nn\n"
        "def model(input_shape, num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, num_classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    local = {"learning_rate": 0.05, "batch_norm": "average"}
    for compress in ("top-k:0.3", "signsgd"):
        for chosen, layers in (("average", 2 * 64 + 1), ("personal", 4 * 64 + 1)):
            out = tmp_path / f"{compress}-{chosen}"
            run(settings(compress, model="normed:model", local={**local, "batch_norm": chosen}), out)
            d = 128 + 650
            k = -(-3 * d // 10)
            update = 4 * k + -(-10 * k // 8) if compress == "top-k:0.3" else 4 * 4 + -(-d // 8)
            assert read_rounds(out)[0].bytes_up == 4 * (2 * 128 + update + 128 + 4 * layers)


def test_da_fl_and_ccvr_compose(tmp_path: Any) -> None:
    run(
        settings("qsgd", preprocess={"kind": "da-fl", "generator": "mean-embedding"}, calibrate="ccvr:50"),
        tmp_path,
    )
    assert read_rounds(tmp_path)[-1].test_accuracy > 0.2


def test_servers_that_do_not_wait_unpack_by_the_round_in_which_a_client_began(tmp_path: Any) -> None:
    others = {"server": "fedbuff", "devices": "log-normal", "clients": 10, "rounds": 15}
    run(settings("rand-k:0.5", **others), tmp_path)
    assert read_rounds(tmp_path)[-1].test_accuracy > 0.8  # in places of another round: below 0.5
    with pytest.raises(UserError, match="cannot run with compress top-k"):
        settings("top-k", **others)


def test_on_the_virtual_clock_a_smaller_update_is_there_sooner(tmp_path: Any) -> None:
    slow = {"devices": {"kind": "constant", "seconds_per_step": 1e-6, "upload_mbps": 0.1, "download_mbps": 1000}}
    for compress in ("none", "signsgd"):
        run(settings(compress, **slow), tmp_path / compress)
    whole, packed = (read_rounds(tmp_path / compress)[-1] for compress in ("none", "signsgd"))
    assert packed.virtual_seconds == pytest.approx(whole.virtual_seconds * packed.bytes_up / whole.bytes_up, rel=0.05)


@pytest.mark.parametrize("compress", ["top-k", "qsgd", "powersgd", "signsgd"])
def test_under_global_dp_what_looks_at_records_is_refused(compress: str) -> None:
    with pytest.raises(UserError, match=r"coordinates by value.*; take compress=rand-k"):
        settings(compress, aggregator="global-dp")


def test_under_global_dp_rand_k_itself_is_taken_and_nothing_that_derives_from_it() -> None:
    assert settings("rand-k", aggregator="global-dp").compress == RandK()
    with pytest.raises(UserError, match="take compress=rand-k"):
        settings({"kind": "rand-k", "correction": "error-feedback"}, aggregator="global-dp")
    with pytest.raises(UserError, match="take compress=rand-k"):
        settings(_ByTheirSize(), aggregator="global-dp")


class _ByTheirSize(RandK):
    """A way of the user's own that looks like ours and is none."""


def test_under_global_dp_updates_are_clipped_after_they_are_unpacked(tmp_path: Any) -> None:
    """So a client moves the sum by the clipping norm at most, whatever the server multiplied its numbers with."""
    experiment = settings("rand-k:0.1", aggregator={"kind": "global-dp", "noise_multiplier": 0, "clipping_norm": 0.5})
    model = FlatParams(torch.zeros(650), (("w", (650,)),))
    template = payload_template(experiment.algorithm, experiment.algorithm.init(model))
    packing = Packing(experiment.compress, seed=0)
    loud = FlatParams(torch.full((650,), 3.0), model.layout)
    means = [
        _released(experiment.aggregator, packing, template, [update, loud]) for update in (loud, _scaled(loud, 1e6))
    ]
    absent = _released(experiment.aggregator, packing, template, [loud])
    for mean in means:  # of an expected size of 2
        assert torch.linalg.vector_norm(mean - absent, dtype=torch.float64) <= 0.5 / 2 * (1 + 1e-6)
        assert torch.linalg.vector_norm(mean - absent) > 0.49 / 2
    # Each of the two is scaled by 10 first, and clipped then: the other order would leave ten times as much.
    arrived = packing.unpack("delta", _packed(packing, loud, 0), model.layout, 0, 1)
    assert isinstance(arrived, FlatParams)
    assert torch.equal(arrived.flat[arrived.flat != 0], torch.full((65,), 30.0))
    assert clip_factor(float(torch.linalg.vector_norm(arrived.flat)), 0.5) == pytest.approx(0.5 / (30 * 65**0.5))


def test_under_global_dp_numbers_that_nobody_sent_have_the_same_noise_as_all_others() -> None:
    aggregator = GlobalDP(noise_multiplier=1.0, clipping_norm=2.0, noise="seeded")
    model = FlatParams(torch.zeros(20_000), (("w", (20_000,)),))
    packing, zeros = Packing(RandK(share=0.01), seed=0), FlatParams(torch.zeros(20_000), model.layout)
    sent = packing.unpack("delta", _packed(packing, FlatParams(zeros.flat + 1, zeros.layout), 0), model.layout, 0, 1)
    assert isinstance(sent, FlatParams)
    mean = _released(aggregator, packing, {"delta": model}, [zeros]) * 2  # of an expected size of 2
    for chosen in (sent.flat == 0, sent.flat != 0):
        assert float(mean[chosen].std()) == pytest.approx(2.0, rel=0.15)


def test_a_private_run_with_rand_k_learns_and_tells_no_bytes(tmp_path: Any) -> None:
    result = run(
        settings(
            "rand-k:0.5", clients=40, rounds=15, local={"learning_rate": 0.1, "epochs": 2},
            aggregator={"kind": "global-dp", "noise_multiplier": 0.1, "clipping_norm": 3, "noise": "seeded"},
        ),
        tmp_path,
    )  # fmt: skip
    assert result["final_accuracy"] > 0.6
    assert read_rounds(tmp_path)[0].bytes_up is None


def _scaled(update: FlatParams, factor: float) -> FlatParams:
    return FlatParams(update.flat * factor, update.layout)


def _packed(packing: Packing, update: FlatParams, client: int) -> Any:
    return packing.pack({"delta": update}, update, {}, client, 1)[1]["delta"]


def _released(aggregator: GlobalDP, packing: Packing, template: Payloads, updates: list[FlatParams]) -> torch.Tensor:
    """The mean that comes of updates which travelled packed, of an expected size of 2."""
    unpack = partial(packing.unpack, "delta", layout=layout_of(template["delta"]), server_round=1)
    clients = range(2 - len(updates), 2)  # with one update the first client is the one that is missing
    replies = tuple(
        Reply(client, {"delta": unpack(_packed(packing, update, client), client=client)}, 1, None)
        for client, update in zip(clients, updates, strict=True)
    )
    released = aggregator.mean(Cohort(1, replies, 2, 2.0), noise=Noise.seeded(0), template=template)
    return flattened(released.payloads["delta"]).flat

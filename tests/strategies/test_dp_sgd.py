"""Runs with local.privacy=dp-sgd: what is charged and said, what a spent client sends, resume, engines, refusals."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from dp_accounting import dp_event, rdp
from safetensors.torch import load_file

from clients.paid_rounds import ClientProtection
from clients.policy import open_ledger
from clients.private_steps import round_cost
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.privacy.accounting import epsilon_of_counts
from fl_sim.simulation.client_ledgers import ledger_path
from fl_sim.simulation.rounds import planned_bill
from fl_sim.simulation.run import run
from fl_sim.tables.forecast import forecast
from fl_sim.training import private_steps
from fl_sim.types import LocalSettings
from strategies.dp_sgd import DPSGD

BASE: dict[str, Any] = {
    "data": "digits", "partition": "iid", "clients": 3, "model": "logistic", "rounds": 2, "engine": "inprocess",
}  # fmt: skip
NOISY = {"kind": "dp-sgd", "noise_multiplier": 1.0, "noise": "seeded"}


pytestmark = pytest.mark.usefixtures("coarse_losses")


def settings_of(privacy: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    local = {"learning_rate": 0.5, "momentum": 0.0, "batch_size": 64, "privacy": {**NOISY, **(privacy or {})}}
    return {**BASE, **changes, "local": {**local, **changes.get("local", {})}}


def ran(out: Path, privacy: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return run(experiment_from(settings_of(privacy, **changes)), out)


def _charges(client: int, **changes: Any) -> list[str]:
    job = job_of(experiment_from(settings_of(**changes)))
    path = ledger_path(job, client)
    return [charge.release for charge in open_ledger(path).charges] if path.exists() else []


def _rounds(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("size", "steps", "rounds"), [(500, 10, 100), (64, 3, 7), (30, 0, 5)])
def test_the_cost_of_a_client_is_that_of_dp_accounting(size: int, steps: int, rounds: int) -> None:
    local = LocalSettings(0.1, 0.0, 0.0, batch_size=50, epochs=0 if steps else 1, steps=steps)
    cost = round_cost(ClientProtection(None, 1e-5, 1.0, 1.3, "secret"), local, size, rounds, steps or 1)
    accountant = rdp.RdpAccountant()
    event: Any = dp_event.GaussianDpEvent(1.3)
    if size > 50:
        event = dp_event.PoissonSampledDpEvent(50 / size, event)
    accountant.compose(event, (steps or 1) * rounds)
    ours = epsilon_of_counts({cost.charge: rounds}, 1e-5)
    theirs = accountant.get_epsilon(1e-5)
    assert cost.rate == min(1, 50 / size)
    assert ours == pytest.approx(theirs, rel=0.02)  # the RDP orders of both differ
    pld = dp_accounting.pld.PLDAccountant()
    pld.compose(event, (steps or 1) * rounds)
    assert ours >= pld.get_epsilon(1e-5)


def test_the_noise_that_is_found_spends_epsilon_in_all_rounds_and_of_all_models() -> None:
    local = LocalSettings(0.1, 0.0, 0.0, batch_size=50, epochs=1)
    one, two = (
        round_cost(ClientProtection(3.0, 1e-5, 1.0, None, "secret"), local, 400, 20, steps) for steps in (8, 16)
    )
    for cost, steps in ((one, 8), (two, 16)):
        assert cost.num_steps == steps
        assert 2.99 < epsilon_of_counts({cost.event: 20 * steps}, 1e-5) <= 3.0
    assert two.noise_multiplier > one.noise_multiplier


def test_the_pld_accountant_finds_less_noise_for_the_same_epsilon() -> None:
    local = LocalSettings(0.1, 0.0, 0.0, batch_size=50, epochs=1)
    noises = []
    for accountant in ("rdp", "pld"):
        protection = ClientProtection(3.0, 1e-5, 1.0, None, "secret", accountant)
        cost = round_cost(protection, local, 400, 20, 8)
        assert epsilon_of_counts({cost.event: 160}, 1e-5, accountant=accountant) <= 3.0
        limited = replace(protection, noise_multiplier=cost.noise_multiplier)
        assert round_cost(limited, local, 400, 20, 8).most_rounds == 20
        noises.append(cost.noise_multiplier)
    assert noises[1] < 0.97 * noises[0]


def test_a_run_charges_every_client_for_every_round_and_states_the_highest_cost(tmp_path: Path) -> None:
    result = ran(tmp_path / "run")
    for client in range(3):
        charges = _charges(client)
        assert [name.rpartition(", ")[2] for name in charges] == ["round 1", "round 2"]
    [said] = result["privacy"]
    [listed] = [one for one in result["local_privacy"]["by_records"] if one["records"] == 479]
    assert (said["unit"], said["adjacency"]) == ("record", "add-or-remove-one")
    assert (said["steps"], said["steps_planned"]) == (16, 16)
    assert listed["sampling_rate"] == pytest.approx(64 / 479)
    assert said["epsilon"] == said["epsilon_realised"]
    assert not said["simulation_only"] or "seed" in said["does_not_cover"]
    for record in _rounds(tmp_path / "run"):
        assert record.get("train_loss") is None


@pytest.mark.parametrize("algorithm", ["fedavg", "ditto", "fedrep"])
def test_the_forecast_is_the_bill_and_the_ledgers(algorithm: str, tmp_path: Path) -> None:
    changes = {"algorithm": algorithm, "model": "2nn"}
    experiment = experiment_from(settings_of(**changes))
    bill = planned_bill(job_of(experiment))
    assert bill.payments is not None
    [payment] = bill.payments
    [said] = ran(tmp_path / "run", **changes)["privacy"]
    [worst] = {charge.event for charge in open_ledger(ledger_path(job_of(experiment), 0)).charges}
    assert said["steps"] == 2 * worst.count  # two rounds
    assert (payment.unit, payment.epsilon, payment.delta) == ("record", said["epsilon"], said["delta"])
    assert not bill.bare


def test_a_forecast_without_time_takes_the_noise_of_the_rdp_accountant(tmp_path: Path) -> None:
    experiment = experiment_from(settings_of({"epsilon": 4.0, "noise_multiplier": None, "accountant": "pld"}))
    found = forecast({"run": experiment}, tmp_path, None, None, billed=lambda: False)
    assert found[0].paid is not None
    assert found[0].paid.payments is not None
    [payment] = found[0].paid.payments
    assert payment.epsilon is not None
    assert payment.epsilon <= 4.0


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        ({"clipping": "per-layer"}, "per-layer, norm 1"),
        ({"clipping": "per-layer", "layer_norms": "0.6,0.6,0.5"}, "per-layer, norms 0.6, 0.6, 0.5"),
        ({"clipping": "automatic", "stability": 0.5}, "automatic, norm 1, stability 0.5"),
    ],
)
def test_the_clipping_changes_the_model_and_is_stated_and_the_cost_stays(
    privacy: dict[str, Any], words: str, tmp_path: Path
) -> None:
    one_step = {"model": "2nn", "rounds": 1, "clients": 2, "local": {"epochs": 0, "steps": 1}}
    flat, other = (ran(tmp_path / name, given, **one_step) for name, given in (("flat", {}), ("other", privacy)))
    assert flat["local_privacy"]["clipping"] == "flat, norm 1"
    assert other["local_privacy"]["clipping"] == words
    assert other["local_privacy"]["by_records"] == flat["local_privacy"]["by_records"]
    for said in ("epsilon", "delta", "steps", "adjacency", "unit", "events"):
        assert other["privacy"][0].get(said) == flat["privacy"][0].get(said)
    models = [load_file(tmp_path / name / "model.safetensors") for name in ("flat", "other")]
    assert not all(models[0][name].equal(models[1][name]) for name in models[0])
    caption = DPSGD.captions([DPSGD(noise_multiplier=1, **privacy), DPSGD(epsilon=1)], "; ".join)
    assert caption == [f"DP-SGD: the gradient of each record is clipped ({words}; flat, norm 1) before noise is added."]


@pytest.mark.parametrize(
    ("privacy", "match"),
    [
        ({"layer_norms": [1.0]}, r"layer_norms needs local\.privacy\.clipping=per-layer"),
        ({"clipping": "per-layer", "layer_norms": [1.0], "clipping_norm": 2.0}, "clipping_norm follows"),
        ({"clipping": "per-layer", "layer_norms": [1.0, -1.0]}, "greater than 0"),
        ({"clipping": "per-layer", "layer_norms": [1.0, 1.0]}, r"2 norms, and the model has 1 layers .*\(1\)"),
        ({"stability": 0.1}, r"stability needs local\.privacy\.clipping=automatic"),
        ({"clipping": "automatic", "stability": 0.0}, "greater than 0"),
        ({"clipping": "adaptive"}, "flat"),
    ],
)
def test_clipping_that_does_not_fit_is_refused(privacy: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=match):
        ran(tmp_path / "run", privacy)
    assert not _charges(0)


def test_charged_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> object:
        raise RunError("no step is made")

    monkeypatch.setattr(private_steps, "train_privately", broken)
    monkeypatch.setattr(private_steps, "train_compiled", broken)
    with pytest.raises(RunError, match="client 0 in round 1") as refused:
        ran(tmp_path / "run")
    assert "no step is made" not in str(refused.value)  # a client's message may quote its records
    assert len(_charges(0)) == 1


def test_a_client_whose_budget_is_spent_sends_nothing(tmp_path: Path) -> None:
    alone = {"epsilon": 6.0, "noise_multiplier": 1.0}
    result = ran(tmp_path / "run", alone, rounds=4)
    [said] = result["privacy"]
    trained = {one["rounds"] for one in result["local_privacy"]["by_records"]}
    assert 0 < max(trained) < 4
    assert said["epsilon"] <= 6.0
    assert len(_charges(0)) == result["local_privacy"]["by_records"][0]["rounds"]
    first = load_file(tmp_path / "run" / "model.safetensors")
    shorter = ran(tmp_path / "short", alone, rounds=max(trained))
    assert shorter["privacy"][0]["steps"] == said["steps"]
    assert first.keys() == load_file(tmp_path / "short" / "model.safetensors").keys()


def test_a_second_run_with_secret_noise_is_charged_again_and_a_seeded_one_is_not(tmp_path: Path) -> None:
    for number in range(2):
        ran(tmp_path / f"seeded-{number}")
    assert len(_charges(0)) == 2
    for number in range(2):
        ran(tmp_path / f"secret-{number}", {"noise": "secret"})
    assert len(_charges(0)) == 6
    said = [json.loads((tmp_path / f"secret-{number}" / "result.json").read_text())["privacy"][0] for number in (0, 1)]
    assert said[1]["epsilon_together"] > said[0]["epsilon_together"] > said[0]["epsilon"]  # six, four rounds
    assert "hold up to 6 releases about the same records" in said[1]["guarantee"]
    models = [load_file(tmp_path / name / "model.safetensors") for name in ("seeded-0", "seeded-1", "secret-0")]
    assert all(models[0][name].equal(models[1][name]) for name in models[0])
    assert not all(models[0][name].equal(models[2][name]) for name in models[0])


@pytest.mark.parametrize("algorithm", ["scaffold", "ditto", "fedper"])
def test_a_resumed_run_has_the_bits_and_the_charges_of_an_uninterrupted_one(
    algorithm: str, tmp_path: Path, resumed_like: Callable[[Any, Path], dict[str, Any]]
) -> None:
    experiment = experiment_from(settings_of(algorithm=algorithm, rounds=3, model="2nn", local={"batch_size": 200}))
    whole = run(experiment, tmp_path / "whole")
    charged = _charges(0)
    assert len(charged) == 3
    resumed = resumed_like(experiment, tmp_path / "whole")
    assert _charges(0) == charged  # seeded noise: the same release
    assert whole["privacy"][0]["epsilon"] == resumed["privacy"][0]["epsilon"]
    assert whole["privacy"][0]["steps"] == resumed["privacy"][0]["steps"]


def test_a_start_on_synthetic_records_and_private_rounds_have_one_bill(
    tmp_path: Path, stop_after: Callable[[int], Any]
) -> None:
    pool = {
        "kind": "da-fl", "generator": "mean-embedding", "epsilon": 5, "gamma": 0.5, "noise": "seeded",
        "train_on": "own", "server_epochs": 10,
    }  # fmt: skip
    experiment = experiment_from(settings_of(preprocess=pool))
    planned = planned_bill(job_of(experiment))
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "run", observer=stop_after(1))
    result = run(experiment, tmp_path / "run")
    start, rounds = result["privacy"]
    ledgers = [open_ledger(ledger_path(job_of(experiment), client)) for client in range(3)]
    for ledger in ledgers:
        labels, generator, *steps = [charge.release for charge in ledger.charges]
        assert labels.startswith("labels ")
        assert generator.startswith("generator ")
        assert [name.rpartition(", ")[2] for name in steps] == ["round 1", "round 2"]
    # The whole run's cost is that of all releases together: more than either, and at most their sum.
    assert start["epsilon_whole_run"] == rounds["epsilon_whole_run"]
    assert max(start["epsilon"], rounds["epsilon"]) < rounds["epsilon_whole_run"]
    assert rounds["epsilon_whole_run"] <= start["epsilon"] + rounds["epsilon"]
    generator = ledgers[0].charges[1].event
    counts = {generator: 1, ledgers[0].charges[2].event: 2}
    assert rounds["epsilon_whole_run"] >= epsilon_of_counts(counts, 1e-5, accountant="pld") - 1e-9
    assert rounds["epsilon_together"] > rounds["epsilon"]
    assert "NOT private" not in start["does_not_cover"]
    assert planned.payments is not None
    assert [one.unit for one in planned.payments] == ["record", "record"]
    assert not planned.bare
    # Clients send their synthetic records, and do not receive those of others.
    assert result["bytes"]["before"]["synthetic_records"]["down"] == 0
    assert result["bytes"]["before"]["synthetic_records"]["up"] > 0
    [listed] = [one for one in result["local_privacy"]["by_records"] if one["records"] == 479]
    assert listed["sampling_rate"] == pytest.approx(64 / 479)  # own records alone
    ran(tmp_path / "plain")
    first = [_rounds(tmp_path / name)[0]["test_accuracy"] for name in ("run", "plain")]
    assert first[0] != first[1]  # another first model
    assert run(experiment, tmp_path / "whole")["final_accuracy"] == result["final_accuracy"]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"algorithm": "fedlc"}, "logit_shift"),
        ({"algorithm": "feddisco"}, "number of a client's records of each class"),
        ({"algorithm": "ifca"}, "reads a client's records"),
        ({"algorithm": "fedala"}, "reads a client's records"),
        ({"algorithm": "moon"}, "contrast"),
        ({"algorithm": "fedmix"}, "share facts"),
        ({"algorithm": "pfedme"}, "steps of one SGD"),
        ({"algorithm": "knn-per"}, "predict by their records"),
        ({"aggregator": "global-dp"}, "aggregator global-dp cannot run"),
        ({"preprocess": "da-fl"}, "preprocess.train_on=own preprocess.server_epochs=5"),
        ({"preprocess": {"kind": "da-fl", "train_on": "own"}}, "preprocess.server_epochs=5, or another number"),
        ({"preprocess": "private-start"}, "preprocess private-start"),
        ({"calibrate": "ccvr"}, "calibrate ccvr reads"),
        ({"server": "fedbuff", "devices": "log-normal"}, "server=fedbuff cannot run with a privacy guarantee"),
        ({"local": {"augment": "flip"}}, "local.augment=flip"),
        ({"evaluate": {"validation": 0.1}}, "evaluate.validation"),
        ({"evaluate": {"clients": "class-shares"}}, "evaluate.clients"),
    ],
)
def test_what_reads_records_without_noise_is_refused(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=match):
        ran(tmp_path / "run", **changes)
    assert not _charges(0)


class MyPrivacy(DPSGD):
    """Somebody else's mechanism, of which nobody knows what it costs."""


def test_a_mechanism_of_ones_own_is_refused() -> None:
    with pytest.raises(UserError, match="is your own code, and no epsilon would cover it"):
        experiment_from({**BASE, "local": {"privacy": MyPrivacy(epsilon=1.0)}})
    for value in (0.1, True, [1], None):
        with pytest.raises(UserError, match=r"local\.privacy"):
            experiment_from({**BASE, "local": {"privacy": value}})


def test_settings_without_noise_are_refused() -> None:
    with pytest.raises(UserError, match=r"needs local\.privacy\.epsilon"):
        experiment_from({**BASE, "local": {"privacy": "dp-sgd"}})


def test_an_epsilon_that_no_noise_reaches_is_refused(tmp_path: Path) -> None:
    for epsilon in (1e-9, 1e-4):
        with pytest.raises(UserError, match=r"out of reach|too coarse"):
            ran(tmp_path / f"run-{epsilon}", {"epsilon": epsilon, "noise_multiplier": None})
    with pytest.raises(UserError, match=r"epsilon=2 does not allow the first round of clients with 47\d records"):
        ran(tmp_path / "other", {"epsilon": 2.0})
    assert not _charges(0)

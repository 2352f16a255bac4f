"""Which of an experiment's seeds every purpose takes, and that keys of earlier versions stay as they were."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_sim import seeding
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import Job, job_of
from fl_sim.simulation.client_ledgers import ledger_path
from fl_sim.simulation.run import run
from fl_sim.stages.dafl.pool import pool_key
from fl_sim.stages.pate.noisy_labels import votes_key
from fl_sim.tables.labels import run_name

APART = {"seed": 1, "partition_seed": 2, "model_seed": 3, "sampling_seed": 4}
QUICK = {"model": "logistic", "rounds": 1, "engine": "inprocess", "local": {"batch_size": 32}}
FEDERATED = {
    **QUICK, "partition": {"kind": "feature-noise", "variant": "niid-bench"}, "sampler": "fixed-size:3",
    "attack": "label-flip:1", "evaluate": {"validation": 0.1},
}  # fmt: skip
TEACHERS = {
    **QUICK, "clients": 3,
    "algorithm": {"kind": "pate", "queries": 10, "public": "train", "public_records": 50,
                  "student": {"kind": "supervised", "steps": 1}},
}  # fmt: skip


def quick(**changes: object) -> Job:
    return job_of(experiment_from({**QUICK, **changes}))


@pytest.mark.usefixtures("quick_accounting")
@pytest.mark.parametrize(
    ("settings", "taken"),
    [
        (FEDERATED, {"partition": 2, "feature-noise": 2, "test feature-noise": 2, "validation": 2, "model": 3,
                     "sampler": 4, "hostile clients": 1, "batches": 1}),
        (TEACHERS, {"partition": 2, "public pool": 2, "teacher": 3, "teacher batches": 1, "student": 1}),
    ],
)  # fmt: skip
def test_every_purpose_takes_the_seed_that_it_belongs_to(
    settings: Mapping[str, Any], taken: Mapping[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: dict[str, set[int]] = {}
    key = seeding._key

    def watched(seed: int, purpose: str, keys: tuple[int, ...]) -> int:
        seeds.setdefault(purpose, set()).add(seed)
        return key(seed, purpose, keys)

    monkeypatch.setattr(seeding, "_key", watched)
    run(experiment_from({**settings, **APART}), tmp_path / "run")
    assert {purpose: seeds[purpose] for purpose in taken} == {purpose: {seed} for purpose, seed in taken.items()}


def test_one_seed_apart_changes_what_belongs_to_it_and_nothing_else() -> None:
    before = quick(partition="iid")
    for name, changes_split, changes_model in (
        ("partition_seed", True, False), ("model_seed", False, True), ("sampling_seed", False, False),
    ):  # fmt: skip
        after = quick(partition="iid", **{name: 1})
        same_split = all(np.array_equal(*pair) for pair in zip(before.shards, after.shards, strict=True))
        weights = zip(before.model().parameters(), after.model().parameters(), strict=True)
        assert (same_split, all(torch.equal(*pair) for pair in weights)) == (not changes_split, not changes_model)


def test_a_seed_apart_that_is_seed_itself_gives_the_same_split_and_its_ledger() -> None:
    one, other = quick(seed=5), quick(seed=0, partition_seed=5)
    assert all(np.array_equal(*pair) for pair in zip(one.shards, other.shards, strict=True))
    assert ledger_path(one, 3) == ledger_path(other, 3)
    assert ledger_path(one, 3) == ledger_path(quick(seed=5, partition_seed=6), 3), "ten clients of a class each"
    dealt, anew = quick(seed=5, partition="iid"), quick(seed=5, partition="iid", partition_seed=6)
    assert ledger_path(dealt, 3) != ledger_path(anew, 3)


def test_other_labels_of_the_same_records_have_ledgers_beside_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, classes = np.zeros((100, 32, 32, 3), np.uint8), np.arange(100)
    np.savez(tmp_path / "cifar100.npz", x_train=images, y_train=classes, x_test=images, y_test=classes)
    monkeypatch.setenv("FL_SIM_DATA", str(tmp_path))
    fine, coarse = (ledger_path(quick(data=f"cifar100{of}", partition="iid"), 3) for of in ("", "-coarse"))
    assert fine != coarse, "other labels may deal the records in another way"
    assert fine.parent.parent == coarse.parent.parent, "where all that is released about them is added up"


def test_what_is_kept_between_runs_is_kept_by_the_seeds_that_it_depends_on() -> None:
    def changed(key: Any, **settings: object) -> list[str]:
        apart = ("partition_seed", "model_seed", "sampling_seed")
        return [name for name in apart if key(quick(**settings, **{name: 1})) != key(quick(**settings))]

    assert changed(pool_key, preprocess="da-fl") == ["partition_seed"]
    assert changed(votes_key, algorithm="pate", clients=3) == ["partition_seed", "model_seed"]
    assert len(changed(lambda job: run_name(job.experiment, job.dataset))) == 3


def test_runs_without_seeds_apart_keep_their_names() -> None:
    job = quick()
    assert run_name(job.experiment, job.dataset) == "fedavg-digits-label-1-seed-0-7ff0da5a"


def test_cohorts_that_must_stay_secret_have_no_seed() -> None:
    with pytest.raises(UserError, match=r"sampling_seed=3 .*global-dp.*leave it out"):
        experiment_from({"aggregator": "global-dp", "sampling_seed": 3})
    assert experiment_from({"aggregator": "global-dp", "partition_seed": 3}).seed_of_sampling == 0

"""DA-FL on public features: class Gaussians are released, charged, kept as they are, and trained on alone."""

import hashlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from safetensors.torch import load_file, save

from clients.dafl.settings import DaFl
from clients.policy import open_ledger
from fl_sim.data import version_of
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.experiment.job import job_of
from fl_sim.privacy.accounting import epsilon
from fl_sim.simulation.client_ledgers import ledger_path
from fl_sim.simulation.client_runtime import as_kept, to_generator
from fl_sim.simulation.run import run
from fl_sim.stages.dafl.pool import FACTS, load, pool_key, pools_root

pytestmark = pytest.mark.usefixtures("quick_accounting", "own_caches")

SETTINGS = (
    "features=scattering", "partition=iid", "clients=2", "model=logistic", "rounds=2", "engine=inprocess",
    "preprocess.gamma=1", "preprocess.labels.epsilon=0.5", "preprocess.generator=gaussian",
    "preprocess.train_on=synthetic", "preprocess.noise=seeded",
)  # fmt: skip


@pytest.fixture
def own_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("POOLS", "LEDGERS", "FEATURES"):
        monkeypatch.setenv(f"FL_SIM_{name}", str(tmp_path / name.lower()))


def made(*overrides: str) -> Experiment:
    return experiment_from(with_overrides({"preprocess": "da-fl"}, [*SETTINGS, *overrides]))


def test_the_pool_is_of_floats_charged_before_it_is_there_and_enough_to_learn_from(tmp_path: Path) -> None:
    result = run(made(), tmp_path / "run")
    assert result["final_accuracy"] > 0.6
    assert not list(tmp_path.glob("run/*.png"))
    [pool] = (tmp_path / "run").glob("synthetic-*.safetensors")
    tensors = load_file(pool)
    assert tensors["inputs"].dtype == torch.float32
    assert tensors["inputs"].shape == (result["preprocess"]["num_synthetic"], 324)
    job = job_of(made())
    for client in (0, 1):
        charges = {charge.release: charge.event for charge in open_ledger(ledger_path(job, client)).charges}
        name = job.experiment.preprocess.release_of(client, 0, version_of("scattering"))
        assert set(charges) == {f"labels {name}", f"generator {name}"}
        paid = charges[f"generator {name}"]
        assert isinstance(paid, dp_event.SelfComposedDpEvent)
        assert (type(paid.event), paid.count) == (dp_event.GaussianDpEvent, 1)
        assert 0.999 * 9.5 < epsilon([paid], 1e-5) <= 9.5
    (said,) = result["privacy"]
    assert said["epsilon"] <= 10
    assert "everything this run releases" in said["covers"]


def test_a_pool_with_numbers_out_of_range_is_refused(tmp_path: Path) -> None:
    run(made(), tmp_path / "run")
    job = job_of(made())
    folder = pools_root() / pool_key(job)
    assert load(folder, job, reused=True).num_synthetic > 0
    [path] = folder.glob("synthetic-*.safetensors")
    tensors = load_file(path)
    tensors["inputs"][0, 0] = 1.5
    path.unlink()
    content = save(tensors)
    changed = folder / f"synthetic-{hashlib.sha256(content).hexdigest()[:16]}.safetensors"
    changed.write_bytes(content)
    facts = (folder / FACTS).read_text().replace(path.name, changed.name)
    (folder / FACTS).write_text(facts)
    with pytest.raises(UserError, match=r"not all numbers in \[-1, 1\]"):
        load(folder, job, reused=True)


def test_pools_and_releases_of_pixels_and_features_have_other_names() -> None:
    one = job_of(made())
    other = replace(one, experiment=one.experiment.model_copy(update={"features": "none"}))
    assert pool_key(one) != pool_key(other)
    settings = DaFl()
    assert settings.release_of(0, 0) != settings.release_of(0, 0, version_of("scattering"))
    assert settings.release_of(0, 0) == settings.release_of(0, 0, version_of("none"))
    assert ledger_path(one, 0) == ledger_path(other, 0), "the records are the same, and so is their ledger"


def test_generators_see_features_as_they_are_and_pools_keep_them() -> None:
    job = job_of(made())
    scaled = torch.from_numpy(job.dataset.train.inputs[:20]) * math.sqrt(324)
    seen = to_generator(scaled, job)
    np.testing.assert_allclose(seen.numpy(), job.dataset.train.inputs[:20], atol=1e-6)
    assert torch.equal(as_kept(seen, job), seen)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["features=none"], "gaussian makes vectors, and these records are images of shape"),
        (["preprocess.generator=marginals"], "features=scattering gives records of 324 features"),
        (["preprocess.generator=mean-embedding"], "mean-embedding makes images"),
    ],
)
def test_generators_that_do_not_fit_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        job_of(made(*overrides))

"""``fl-sim report --pictures``: a real run of vectors gets images, all others one line on why not."""

import json
import re

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from fl_sim.cli.report import _shape_of, find_images
from fl_sim.cli.verbs import report
from fl_sim.experiment.experiment import experiment_from
from fl_sim.report.figures.by_epsilon import PICTURES
from fl_sim.report.runs import find
from fl_sim.simulation.run import run as run_experiment

pytestmark = pytest.mark.usefixtures("quick_accounting")

app = typer.Typer()
app.command()(report)

SETTINGS = {
    "data": "digits", "features": "scattering", "clients": 2, "partition": "iid", "model": "logistic",
    "algorithm": {"kind": "tstr", "classifiers": ["discriminant"]}, "engine": {"kind": "inprocess", "workers": 1},
    "preprocess": {"kind": "da-fl", "generator": "gaussian", "gamma": 0.1, "noise": "seeded"},
}  # fmt: skip


@pytest.fixture
def quick(fewer_images):
    fewer_images(steps=3, made=20)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FL_SIM_POOLS", str(folder / ".pools"))
        patched.setenv("FL_SIM_LEDGERS", str(folder / ".ledgers"))
        return folder / "gaussian", run_experiment(experiment_from(SETTINGS), folder / "gaussian")


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def test_a_run_of_vectors_is_told_shown_and_shown_again(finished, quick):
    out, facts = finished
    assert facts["image_shape"] == [1, 8, 8]
    told = run(out).stderr
    assert "synthetic records are feature vectors, which are not shown" in told
    assert f"'fl-sim report {out} --pictures' finds" in (out / "report/report.html").read_text().replace("&#x27;", "'")
    told = run(out, "--pictures")
    assert re.match(r"finding images for \d+ synthetic feature vectors of ", told.stderr)
    assert "samples-digits-iid-features-scattering-generator-gaussian.png" in told.stdout
    assert "found for synthetic feature vectors" in (out / "report/report.html").read_text()
    again = run(out, "--json")
    assert again.stderr == ""
    assert any("samples-digits" in name for name in json.loads(again.stdout)["figures"])
    assert (out / PICTURES).exists()


def test_where_no_records_are_vectors_one_line_says_that_nothing_is_to_be_found(tmp_path):
    settings = {"clients": 2, "rounds": 1, "partition": "iid", "model": "logistic", "engine": "inprocess"}
    run_experiment(experiment_from(settings), tmp_path / "run")
    told = run(tmp_path / "run", "--pictures").stderr
    assert told == "--pictures has no effect: no run here has synthetic records that are feature vectors\n"


def changed(out, tmp_path, **changes):
    """The run in ``out`` with other values in its files."""
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.toml", "rounds.jsonl"):
        (other / name).write_text(
            (out / name).read_text().replace('"scattering"', f'"{changes.pop("features", "scattering")}"')
        )
    result = json.loads((out / "result.json").read_text()) | changes
    (other / "result.json").write_text(json.dumps({name: value for name, value in result.items() if value is not None}))
    (found,) = find([other]).runs
    return found


VECTORS = np.zeros((1, 324), dtype=np.float32)


def test_a_run_that_does_not_tell_the_shape_of_its_images_is_refused(finished, tmp_path):
    with pytest.raises(ValueError, match=r"shape of the images.* repeat the run"):
        find_images(changed(finished[0], tmp_path, image_shape=None), VECTORS)


def test_features_that_this_version_does_not_know_are_refused(finished, tmp_path):
    with pytest.raises(ValueError, match="features=wavelets"):
        find_images(changed(finished[0], tmp_path, features="wavelets"), VECTORS)


def test_vectors_that_are_no_features_of_such_images_are_refused(finished, tmp_path):
    with pytest.raises(ValueError, match="are no features of such images"):
        find_images(changed(finished[0], tmp_path, image_shape=[3, 8, 8]), VECTORS)


def test_an_older_run_of_a_known_data_set_has_the_shape_of_that(finished, tmp_path):
    older = changed(finished[0], tmp_path, image_shape=None)
    known = older.config.model_copy(update={"data": "mnist"})
    assert _shape_of(type(older)(older.path, known, {}, (), older.result)) == (1, 28, 28)

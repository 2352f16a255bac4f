"""Public features: made once, kept in a file that is checked, and stated wherever results are."""

from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from fl_sim.data import features, fingerprint, load, scattering
from fl_sim.data.features import Features, as_features, vectors_of, version_of
from fl_sim.data.kept import cache_root
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.simulation.run import run
from fl_sim.stages.pate.noisy_labels import votes_key
from fl_sim.tables.labels import run_name
from fl_sim.types import Dataset, Examples


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FL_SIM_FEATURES", str(tmp_path / "features"))
    return tmp_path / "features"


def images(seed: int = 0, *, shape: tuple[int, ...] = (1, 8, 8)) -> Dataset:
    generator = np.random.default_rng(seed)
    train, test = (
        Examples(generator.integers(0, 256, (count, *shape), dtype=np.uint8), np.arange(count) % 2) for count in (6, 4)
    )
    return Dataset("few", train, test, 2, (0.5,), (0.5,), "a note")


def kept(root: Path) -> list[Path]:
    return sorted(root.glob("*/features.safetensors"))


def test_a_data_set_becomes_vectors_and_says_so() -> None:
    made = as_features(images(), "scattering", "records")
    assert made.input_shape == (324,)
    assert np.array_equal(made.train.inputs, scattering.features_of(images().train.inputs))
    assert np.array_equal(made.test.labels, images().test.labels)
    assert made.note == "a note; scattering features of the images, 324 numbers a record, which look at no other record"
    assert (made.mean, made.std) == ((0.0,), (324**-0.5,))


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("scattering-1", [[0.060306, 0.096634, 0.05652], [0.093008, 0.091501, 0.017207]]),
        ("whitened-scattering-1", [[-0.018754, 0.050402, -0.041734], [0.045091, 0.00513, -0.118793]]),
        ("scattering-maps-1", [[-0.033776, 0.044306, -0.04199], [0.029142, 0.027321, -0.111266]]),
        ("root-scattering-maps-1", [[-0.080521, -0.049808, -0.084202], [-0.031214, -0.032899, -0.111351]]),
        ("mirrored-root-scattering-maps-1", [[-0.106509, -0.110728, 0.010223], [-0.056591, -0.117259, 0.121815]]),
        ("mirrored-scattering-1", [[0.113113, 0.108541, -0.054468], [0.136115, 0.081265, -0.045682]]),
        ("mirrored-whitened-scattering-1", [[0.017844, -0.010891, -0.00421], [0.052325, -0.068479, 0.04638]]),
        ("mirrored-scattering-maps-1", [[0.011449, -0.007626, -0.002973], [0.062717, -0.073423, 0.040713]]),
    ],
)
def test_a_version_stands_for_the_same_numbers_always(name: str, numbers: list[list[float]]) -> None:
    """Kept features are found by it: where other numbers are made, a cache holds the old ones under its name."""
    kind = name.removesuffix("-1")
    assert version_of(kind) == name
    found = as_features(load("digits"), kind, "digits").train.inputs[:2, :3]
    assert found == pytest.approx(np.array(numbers), abs=1e-5), "count the version in fl_sim/data/features.py up"


@pytest.mark.parametrize("kind", ["scattering", "whitened-scattering", "scattering-maps", "root-scattering-maps"])
def test_mirrored_features_of_an_image_and_of_its_mirror_image_are_the_same(kind: Features) -> None:
    before = load("digits").train.inputs[:20]
    after = np.ascontiguousarray(before[..., ::-1])
    mirrored = cast("Features", f"mirrored-{kind}")
    assert np.array_equal(vectors_of(before, mirrored), vectors_of(after, mirrored))
    assert not np.array_equal(vectors_of(before, kind), vectors_of(after, kind))
    assert 2 * vectors_of(before, mirrored).shape[1] == vectors_of(before, kind).shape[1]


def test_features_are_made_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first = as_features(images(), "scattering", "records")
    assert "computing the scattering features of 10 images; later runs read them from" in capsys.readouterr().err
    monkeypatch.setattr(scattering, "features_of", lambda _: pytest.fail("they were made again"))
    again = as_features(images(), "scattering", "records")
    assert np.array_equal(first.train.inputs, again.train.inputs)
    assert not capsys.readouterr().err


def test_other_records_and_other_versions_have_a_file_of_their_own(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_features(images(), "scattering", "records")
    as_features(images(1), "scattering", "other records")
    monkeypatch.setitem(features._VERSION, "scattering", 10**6)
    as_features(images(), "scattering", "records")
    assert len(kept(root)) == 3


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def with_another_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def of_other_records(path: Path) -> None:
    as_features(images(1), "scattering", "other records")
    (other,) = set(kept(path.parent.parent)) - {path}
    path.write_bytes(other.read_bytes())


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncated, with_another_bit, of_other_records, empty])
def test_a_damaged_file_is_made_again_in_words(damage, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = as_features(images(), "scattering", "records")
    (path,) = kept(root)
    whole = path.read_bytes()
    damage(path)
    assert path.read_bytes() != whole
    capsys.readouterr()
    again = as_features(images(), "scattering", "records")
    assert f"{path} cannot be used" in capsys.readouterr().err
    assert np.array_equal(first.train.inputs, again.train.inputs)
    as_features(images(), "scattering", "records")
    assert not capsys.readouterr().err


def test_where_nothing_can_be_written_it_is_said(root: Path) -> None:
    root.write_text("no folder")
    with pytest.raises(RunError, match="there is a file where a folder is needed"):
        as_features(images(), "scattering", "records")


def test_vectors_and_tiny_images_are_refused(tmp_path: Path) -> None:
    arrays = {"x_train": np.zeros((4, 3)), "y_train": np.arange(4) % 2, "x_test": np.zeros((2, 3)), "y_test": [0, 1]}
    np.savez(tmp_path / "table.npz", **arrays)
    with pytest.raises(UserError, match=r"features=scattering .*images.* vectors of 3"):
        load(f"npz:{tmp_path}/table.npz", None, "scattering")
    with pytest.raises(UserError, match="images from 8x8 to 128x128 pixels, but these have 8x5"):
        as_features(images(shape=(1, 8, 5)), "scattering", "records")


SETTINGS = {"data": "digits", "features": "scattering", "clients": 2, "partition": "iid", "rounds": 1}


def test_training_sees_numbers_of_about_deviation_one() -> None:
    job = job_of(experiment_from(SETTINGS))
    assert job.experiment.model.name == "mlp"
    assert job.dataset.input_shape == (324,)
    assert torch.tensor(job.dataset.std).item() == pytest.approx(1 / 18)


def test_what_fits_no_vector_is_refused() -> None:
    with pytest.raises(UserError, match="normalise=unit scales images to"):
        job_of(experiment_from({**SETTINGS, "normalise": "unit"}))
    with pytest.raises(UserError, match=r"local\.augment=flip changes images"):
        job_of(experiment_from({**SETTINGS, "local": {"augment": "flip"}}))
    with pytest.raises(UserError, match="niid-cnn"):
        job_of(experiment_from({**SETTINGS, "model": "niid-cnn"})).model()
    with pytest.raises(UserError, match="features"):
        experiment_from({"features": "wavelets"})


def test_keys_and_names_know_the_features_and_stay_as_they_were_without() -> None:
    with_them, without = (experiment_from({**SETTINGS, "features": one}) for one in ("scattering", "none"))
    jobs = [job_of(one) for one in (with_them, without)]
    names = [run_name(job.experiment, job.dataset) for job in jobs]
    assert "digits-scattering-iid" in names[0]
    assert "scattering" not in names[1]
    assert "features" not in without.as_written()
    assert "features" not in without.chosen("data", "features")
    assert with_them.as_written()["features"] == "scattering"
    voting = {"data": "digits", "algorithm": {"kind": "pate", "student": "supervised"}}
    keys = [votes_key(job_of(experiment_from({**voting, "features": one}))) for one in ("scattering", "none")]
    assert keys[0] != keys[1]


def test_a_run_learns_on_features_and_states_them(tmp_path: Path) -> None:
    table = {**SETTINGS, "model": "logistic", "rounds": 3, "engine": {"kind": "inprocess", "workers": 1}}
    facts = run(experiment_from(table), tmp_path / "run")
    assert facts["features"] == "scattering"
    assert "scattering features of the images, 324 numbers" in facts["data_note"]
    assert facts["final_accuracy"] > 0.8
    assert 'features = "scattering"' in (tmp_path / "run" / "config.toml").read_text()


def test_the_cache_is_the_users_unless_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FL_SIM_FEATURES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_root() == tmp_path / "cache" / "fl-sim" / "features"
    assert fingerprint("digits", None, with_test=True) != fingerprint("digits", None)


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    """A file with records of the user's own, for nobody else to read."""
    generator = np.random.default_rng(0)
    path = tmp_path / "ours.npz"
    arrays = {f"x_{part}": generator.integers(0, 256, (40, 8, 8), dtype=np.uint8) for part in ("train", "test")}
    np.savez(path, y_train=np.arange(40) % 4, y_test=np.arange(40) % 4, **arrays)
    path.chmod(0o600)
    return path


def test_what_is_made_of_private_records_is_as_private_as_they_are(root: Path, own_file: Path) -> None:
    load(f"npz:{own_file}", None, "scattering")
    [path] = kept(root)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_file_that_an_earlier_version_left_open_is_closed(root: Path, own_file: Path) -> None:
    made = load(f"npz:{own_file}").train
    dataset = Dataset(f"npz:{own_file}", made, made, 4, (0.5,), (0.5,))
    as_features(dataset, "scattering", "records")
    [path] = kept(root)
    path.chmod(0o644)
    path.parent.chmod(0o755)
    as_features(dataset, "scattering", "records")
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_features_of_public_records_are_for_all_who_share_them(root: Path) -> None:
    load("digits", None, "scattering")
    as_features(load("digits"), "scattering", "others")
    assert {path.stat().st_mode & 0o040 for path in kept(root)} == {0o040}


@pytest.mark.parametrize(("own", "mode"), [(True, 0o600), (False, 0o640)])
def test_the_averages_of_records_that_clients_share_are_too(
    own: bool,  # noqa: FBT001
    mode: int, own_file: Path, tmp_path: Path,
) -> None:  # fmt: skip
    data = {"data": f"npz:{own_file}"} if own else {}
    algorithm = {"kind": "fedmix", "records_per_average": 2}
    run(
        experiment_from({"algorithm": algorithm, "clients": 2, "rounds": 1, "model": "logistic", **data}),
        tmp_path / "run",
    )
    [pool] = (tmp_path / "run").glob("pool-*.safetensors")
    assert pool.stat().st_mode & 0o740 == mode


@pytest.mark.parametrize("kind", sorted(features._VERSION))
def test_records_that_do_not_suit_are_refused_by_the_name_of_the_features(kind: Features) -> None:
    with pytest.raises(UserError, match=rf"^features={kind} takes images from \d+x\d+ to \d+x\d+ pixels.* have 4x4"):
        as_features(images(shape=(1, 4, 4)), kind, "records")
    with pytest.raises(UserError, match=rf"^features={kind} is for images, but .* vectors of 8 numbers"):
        as_features(images(shape=(8,)), kind, "records")


def test_features_without_a_transform_are_not_taken_for_others() -> None:
    with pytest.raises(AssertionError, match="scattering-of-tomorrow"):
        vectors_of(images().train.inputs, cast("Features", "scattering-of-tomorrow"))

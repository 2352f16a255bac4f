"""Reading npz files, of one's own and MedMNIST's: what is taken as it is, and what is refused in words."""

import tracemalloc
import warnings
import zipfile

import numpy as np
import pytest

from fl_sim.data import content_of, load
from fl_sim.data.dataset import looks_channels_first
from fl_sim.errors import UserError


@pytest.fixture(autouse=True)
def no_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("FL_SIM_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FL_SIM_DATA", raising=False)


def arrays(**changes):
    rng = np.random.default_rng(0)
    made = {
        "x_train": rng.integers(0, 256, (6, 5, 4, 3), dtype=np.uint8), "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": rng.integers(0, 256, (3, 5, 4, 3), dtype=np.uint8), "y_test": np.array([2, 1, 0], dtype=np.uint8),
    }  # fmt: skip
    return {name: array for name, array in {**made, **changes}.items() if array is not None}


def load_from(path, *, save=np.savez, **changes):
    made = arrays(**changes)
    save(path / "own.npz", **made)
    return load(f"npz:{path}/own.npz"), made


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_images_come_back_channels_first_with_int64_labels(tmp_path, save):
    dataset, made = load_from(tmp_path, save=save)
    np.testing.assert_array_equal(dataset.train.inputs, made["x_train"].transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(dataset.test.inputs, made["x_test"].transpose(0, 3, 1, 2))
    assert dataset.train.inputs.dtype == np.uint8
    assert dataset.test.labels.tolist() == [2, 1, 0]
    assert dataset.test.labels.dtype == np.int64
    assert (dataset.num_classes, dataset.input_shape) == (3, (3, 5, 4))


def test_uncompressed_images_are_memory_mapped(tmp_path):
    dataset, _ = load_from(tmp_path)
    base = dataset.train.inputs
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)


def test_arrays_in_fortran_order_are_mapped_as_written(tmp_path):
    dataset, made = load_from(tmp_path, x_train=np.asfortranarray(arrays()["x_train"]))
    np.testing.assert_array_equal(dataset.train.inputs, made["x_train"].transpose(0, 3, 1, 2))


def test_grey_images_may_lack_the_channel_axis(tmp_path):
    grey = arrays()["x_train"][..., 0], arrays()["x_test"][..., 0]
    dataset, _ = load_from(tmp_path, x_train=grey[0], x_test=grey[1])
    assert dataset.input_shape == (1, 5, 4)
    np.testing.assert_array_equal(dataset.train.inputs[:, 0], grey[0])


def test_labels_may_be_a_column(tmp_path):
    dataset, _ = load_from(tmp_path, y_train=np.array([[0], [1], [2], [0], [1], [2]]))
    assert dataset.train.labels.tolist() == [0, 1, 2, 0, 1, 2]


def test_without_constants_images_are_normalised_by_a_half_not_by_their_own_statistics(tmp_path):
    dataset, _ = load_from(tmp_path)
    assert dataset.mean == dataset.std == (0.5, 0.5, 0.5)


def test_constants_in_the_file_are_used(tmp_path):
    dataset, _ = load_from(tmp_path, mean=np.array([0.1, 0.2, 0.3]), std=np.float32(0.25))
    assert dataset.mean == (0.1, 0.2, 0.3)
    assert dataset.std == (0.25, 0.25, 0.25)


def test_groups_say_where_training_records_come_from(tmp_path):
    dataset, _ = load_from(tmp_path, groups=np.array([5, 5, 9, 9, 5, 1], dtype=np.uint16))
    assert dataset.train.groups.tolist() == [5, 5, 9, 9, 5, 1]
    assert dataset.train.groups.dtype == np.int64
    assert dataset.train.take(np.array([5, 0])).groups.tolist() == [1, 5]
    assert dataset.test.groups is None


def test_clients_may_be_texts_and_test_records_have_theirs_too(tmp_path):
    of_train, of_test = np.array(["b", "b", "a", "c", "a", "c"]), np.array(["c", "a", "stranger"])
    dataset, _ = load_from(tmp_path, client_train=of_train, client_test=of_test)
    assert dataset.train.groups.tolist() == [1, 1, 0, 2, 0, 2]
    assert dataset.test.groups.tolist() == [2, 0, 3]
    assert dataset.sources == ("a", "b", "c", "stranger")


@pytest.mark.parametrize(
    ("values", "of_bytes"),
    [
        ("0..1", lambda images: images / 255),
        ("-1..1", lambda images: (images / 127.5 - 1).astype(np.float32)),
        ("0..255", lambda images: images.astype(np.int32)),
    ],
)
def test_float_images_become_bytes_by_the_scale_that_is_set(tmp_path, values, of_bytes):
    made = arrays()
    np.savez(tmp_path / "own.npz", **{**made, **{name: of_bytes(made[name]) for name in ("x_train", "x_test")}})
    dataset = load(f"npz:{tmp_path}/own.npz:values={values}")
    np.testing.assert_array_equal(dataset.train.inputs, made["x_train"].transpose(0, 3, 1, 2))
    assert dataset.note == f"values {values} became 0..255, whole numbers"
    assert len(content_of(f"npz:{tmp_path}/own.npz:values={values}", None)) == 64


def test_float_images_beyond_their_scale_count_as_its_ends_and_must_be_finite(tmp_path):
    made = arrays()
    scaled = made["x_train"] / 255
    scaled[0, 0, 0] = (-3, 7, 0.5)
    np.savez(tmp_path / "own.npz", **{**made, "x_train": scaled, "x_test": made["x_test"] / 255})
    assert load(f"npz:{tmp_path}/own.npz:values=0..1").train.inputs[0, :, 0, 0].tolist() == [0, 255, 128]
    scaled[4, 0, 0, 0] = np.nan
    np.savez(tmp_path / "own.npz", **{**made, "x_train": scaled, "x_test": made["x_test"] / 255})
    with pytest.raises(UserError, match="x_train: record 4 has a pixel that is not finite"):
        load(f"npz:{tmp_path}/own.npz:values=0..1")
    for values, message in (("1..0", "write LOW..HIGH"), ("0..1", "x_train is uint8 .* that are no bytes")):
        np.savez(tmp_path / "bytes.npz", **made)
        with pytest.raises(UserError, match=message):
            load(f"npz:{tmp_path}/bytes.npz:values={values}")


def test_the_content_of_a_file_that_needs_its_settings_is_read_with_them(tmp_path):
    made = arrays()
    np.savez(tmp_path / "own.npz", **{**made, "y_train": made["y_train"] + 1, "y_test": made["y_test"] + 1})
    with pytest.raises(UserError, match="number the classes"):
        load(f"npz:{tmp_path}/own.npz")
    np.savez(tmp_path / "all.npz", **made)
    assert content_of(f"npz:{tmp_path}/own.npz:classes=4", None) == content_of(f"npz:{tmp_path}/all.npz", None)


def test_features_are_float32_and_left_as_they_are(tmp_path):
    x_train, x_test = np.linspace(0, 1, 12).reshape(6, 2), np.ones((3, 2), dtype=np.float32)
    dataset, _ = load_from(tmp_path, x_train=x_train, x_test=x_test)
    assert dataset.train.inputs.dtype == dataset.test.inputs.dtype == np.float32
    np.testing.assert_array_equal(dataset.train.inputs, x_train.astype(np.float32))
    assert dataset.mean == (0.0, 0.0)
    assert dataset.std == (1.0, 1.0)


FEATURES = np.zeros((6, 2), dtype=np.float32)
NOT_FINITE = np.array([[0.0, 1.0], [np.nan, 0.0], [0.0, 1e300]] * 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_train": None, "x_test": None}, "own.npz lacks y_train, x_test; it holds x_train, y_test, but"),
        ({"x_train": arrays()["x_train"][:5]}, "5 records but 6 labels in the train part"),
        ({"x_test": arrays()["x_test"][:0], "y_test": np.array([], dtype=int)}, "no records in the test part"),
        ({"y_train": np.linspace(0, 2, 6)}, "y_train: labels must be integers of shape .* got float64"),
        ({"y_train": np.eye(6, 3, dtype=int)}, r"labels must be integers of shape .* got int64 \(6, 3\)"),
        ({"y_train": np.array([1, 2, 3, 1, 2, 3]), "y_test": np.array([1, 2, 3])}, "from 1 to 3 with 3"),
        ({"y_train": np.array([0, 1, -1, 0, 1, 2])}, "from -1 to 2"),
        ({"y_train": np.array([0, 1, 2**63 - 1, 0, 1, 2])}, "number the classes 0..3 without gaps"),
        ({"x_train": arrays()["x_train"] / 255}, r"images are float64 .*: set the values .* data\.values=0\.\.1"),
        ({"x_train": arrays()["x_train"].reshape(6, 60)}, "uint8 .* is neither uint8 images"),
        ({"x_train": arrays()["x_train"][:, :4]}, r"uint8 of shape \(3, 4, 4\) but test records uint8 of shape \(3, 5"),
        ({"x_train": FEATURES}, r"training records are float32 of shape \(2,\) but test records uint8"),
        ({"x_train": NOT_FINITE}, "x_train: 4 records are not finite, the first is 1"),
        ({"x_train": np.zeros((6, 3, 8, 8), dtype=np.uint8)}, "looks like channels first"),
        ({"mean": np.array([0.1, 0.2])}, "mean must be one number or 3 numbers"),
        ({"mean": np.array(np.inf)}, "mean is not finite"),
        ({"std": np.array([0.1, 0.0, 0.2])}, "std must be above 0, got 0.0"),
        ({"y_train": np.array([0, 1, 2, None, "x", {}], dtype=object)}, "y_train.npy cannot .*never loaded"),
        ({"groups": np.zeros(6, int), "client_train": np.zeros(6, int)}, "client_train and groups, two names of the"),
        ({"client_test": np.zeros(3, int)}, "holds client_test but no client_train"),
        ({"client_train": np.zeros(6, int), "client_test": np.array(["a"] * 3)}, "both must be whole numbers, or both"),
        ({"x_val": arrays()["x_train"]}, "holds only x_val; x_val and y_val go together"),
        ({"x_val": arrays()["x_train"], "y_val": np.zeros(5, int)}, "6 records and 5 labels in the validation part"),
        ({"x_val": arrays()["x_train"], "y_val": np.full(6, 9)}, "validation labels run from 9 to 9, but the labels"),
        ({"x_val": arrays()["x_train"][:, :4], "y_val": np.zeros(6, int)}, "but validation records uint8 of shape"),
        ({"groups": np.zeros(5, int)}, r"groups is int64 of shape \(5,\); it must have a whole number or a text"),
    ],
)  # fmt: skip
def test_arrays_that_are_no_classification_data_are_refused_with_what_they_are(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        load_from(tmp_path, **changes)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("maen", r"did you mean 'mean'\?"),
        ("writers", r"here: client_train"),
        ("x_valid", r"here: x_val and y_val"),
        ("zzz", r"which fl-sim does not read; remove it"),
    ],
)
def test_an_array_that_nothing_reads_is_refused_with_what_may_be_meant(tmp_path, name, meant):
    with pytest.raises(UserError, match=rf"own\.npz holds {name}, which fl-sim does not read.*") as caught:
        load_from(tmp_path, **{name: np.zeros(3)})
    assert caught.match(meant)


def test_validation_records_of_the_file_are_kept_apart_from_what_clients_hold(tmp_path):
    given = arrays()
    found, _ = load_from(tmp_path, x_val=given["x_test"][:2], y_val=given["y_test"][:2])
    assert found.validation is not None
    assert found.validation.labels.tolist() == given["y_test"][:2].tolist()
    assert len(found.train) == len(given["x_train"])
    assert len(found.test) == len(given["x_test"])


@pytest.mark.parametrize("keep", [0, 10, 500, -1])
def test_a_truncated_file_is_refused_by_name(tmp_path, keep):
    np.savez(tmp_path / "own.npz", **arrays())
    (tmp_path / "own.npz").write_bytes((tmp_path / "own.npz").read_bytes()[:keep])
    with pytest.raises(UserError, match=r"own.npz is no readable npz file .* truncated"):
        load(f"npz:{tmp_path}/own.npz")


def test_a_damaged_compressed_member_is_refused_by_name(tmp_path):
    np.savez_compressed(tmp_path / "own.npz", **arrays())
    content = bytearray((tmp_path / "own.npz").read_bytes())
    content[200:260] = bytes(60)
    (tmp_path / "own.npz").write_bytes(content)
    with pytest.raises(UserError, match=r"own.npz: x_train.npy cannot be read"):
        load(f"npz:{tmp_path}/own.npz")


def test_a_known_name_with_other_shapes_or_labels_is_refused(tmp_path):
    np.savez(tmp_path / "cifar10.npz", **arrays())
    with pytest.raises(UserError, match=r"uint8 of shape \(3, 5, 4\), but cifar10 is uint8 of shape \(3, 32, 32\)"):
        load("cifar10", tmp_path)
    images = np.zeros((6, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "svhn.npz", **arrays(x_train=images, x_test=images[:3], y_train=np.array([0, 1, 2, 3, 4, 10])))
    with pytest.raises(UserError, match=r"training labels 0..10, but svhn has 0..9"):
        load("svhn", tmp_path)


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 13])
def test_channels_first_are_refused_however_many_there_are(tmp_path, channels):
    def images(count):
        return np.zeros((count, channels, 20, 20), np.uint8)

    labels = {"y_train": np.arange(6) % 2, "y_test": np.arange(2)}
    np.savez(tmp_path / "nchw.npz", x_train=images(6), x_test=images(2), **labels)
    with pytest.raises(UserError, match=rf"x_train: shape \(6, {channels}, 20, 20\) looks like channels first"):
        load(f"npz:{tmp_path}/nchw.npz")
    last = {name: images(count).transpose(0, 2, 3, 1) for name, count in (("x_train", 6), ("x_test", 2))}
    np.savez(tmp_path / "nhwc.npz", **last, **labels)
    found = load(f"npz:{tmp_path}/nhwc.npz")
    assert found.input_shape == (channels, 20, 20)
    assert found.inferred[0].startswith("images are (records, height, width, channels), here 20 high, 20 wide, ")


@pytest.mark.parametrize(
    ("shape", "is_first"),
    [
        ((4, 20, 30), True), ((3, 2, 8), True), ((13, 64, 64), True), ((4, 4, 8), False), ((8, 8, 13), False),
        ((5, 4, 3), False), ((20, 20, 20), False), ((28, 28, 1), False), ((5, 20, 6), False),
    ],
)  # fmt: skip
def test_channels_first_is_told_by_the_shape_alone(shape, is_first):
    assert looks_channels_first((9, *shape)) is is_first


def test_an_array_that_is_there_twice_is_refused(tmp_path):
    np.savez(tmp_path / "own.npz", **arrays())
    with zipfile.ZipFile(tmp_path / "own.npz", "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        archive.writestr("y_train.npy", archive.read("y_test.npy"))
    with pytest.raises(UserError, match=r"own\.npz holds 2 arrays called 'y_train'"):
        load(f"npz:{tmp_path}/own.npz")


def packed(path, **shapes):
    """Write arrays of zeros that take far less in the file than in memory, without having them in memory."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (shape, dtype) in shapes.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                header = {"descr": dtype, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(member, header)
                left = int(np.prod(shape)) * np.dtype(dtype).itemsize
                while left:
                    left -= member.write(bytes(min(left, 2**20)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": ((2**28, 1), "|u1")}, r"268,435,456 records in x_train but 8 in y_train"),
        ({"y_train": ((2**25,), "<i8")}, r"8 records in x_train but 33,554,432 in y_train"),
        ({"mean": ((2**25,), "<f8")}, r"mean has shape \(33554432,\); it must be one number, or one per channel"),
        (
            {"x_train": ((8, 2**25), "|u1"), "x_test": ((8, 2**25), "|u1")},
            "repeats the same few bytes",
        ),
    ],
)
def test_what_unpacks_to_far_more_than_it_is_is_refused_before_it_is_read(tmp_path, changes, message):
    small = {"x_train": ((8, 4), "<f4"), "y_train": ((8,), "<i8"), "x_test": ((8, 4), "<f4"), "y_test": ((8,), "<i8")}
    packed(tmp_path / "bomb.npz", **{**small, **changes})
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=message):
            load(f"npz:{tmp_path}/bomb.npz")
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_clients_spelled_in_two_ways_are_told_without_their_names(tmp_path):
    of_train = np.array(["ward 1", "Ward 1", "ward 2", "ward 2", "ward 3", "ward 3"])
    dataset, _ = load_from(tmp_path, client_train=of_train)
    (said,) = dataset.counted
    assert said.startswith("1 clients have several spellings")
    assert load_from(tmp_path, client_train=np.array(list("aabbcc")))[0].counted == ()


def written(folder, **changes):
    rng = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", 6), ("val", 2), ("test", 3)):
        arrays[f"{part}_images"] = rng.integers(0, 256, (count, 28, 28, 3), dtype=np.uint8)
        arrays[f"{part}_labels"] = (np.arange(count) % 2).astype(np.uint8)[:, np.newaxis]
    np.savez(folder / "pathmnist.npz", **{**arrays, **changes})
    return f"medmnist:{folder}/pathmnist.npz", arrays


def test_images_and_labels_come_back_and_validation_is_left_out_aloud(tmp_path):
    name, arrays = written(tmp_path)
    found = load(name)
    np.testing.assert_array_equal(found.train.inputs, arrays["train_images"].transpose(0, 3, 1, 2))
    assert found.test.labels.tolist() == [0, 1, 0]
    assert found.note == "its 2 validation images are left out"
    both = load(f"{name}:val=train")
    assert len(both.train) == 8
    assert both.note == "its 2 validation images are trained on, too"
    kept = load(f"{name}:val=validate")
    assert kept.validation is not None
    assert (len(kept.train), len(kept.validation), kept.note) == (6, 2, "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_labels": np.zeros((6, 14), np.uint8)}, r"train_labels has 14 labels per image \(multi-label"),
        ({"test_labels": np.zeros((3, 1))}, r"it must hold one class per image.*\(regression\) are not supported"),
        ({"train_images": np.zeros((6, 28, 28, 28), np.uint8)}, r"volumes \(MedMNIST's 3D sets\) are not supported"),
        ({"train_images": np.zeros((6, 28), np.float32)}, "it must hold uint8 images"),
        ({"x_train": np.zeros(3)}, "x_train, which fl-sim does not read"),
    ],
)
def test_what_is_no_image_with_one_class_is_refused(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        load(written(tmp_path, **changes)[0])


def test_an_unknown_use_and_another_file_are_refused(tmp_path):
    name, _ = written(tmp_path)
    with pytest.raises(UserError, match=r"data\.val = 'tran' \(did you mean 'train'\?\)"):
        load(f"{name}:val=tran")
    np.savez(tmp_path / "own.npz", x_train=np.zeros(3))
    with pytest.raises(UserError, match=r"lacks train_images, .*; it holds x_train"):
        load(f"medmnist:{tmp_path}/own.npz")


def test_channels_first_are_told_as_such_not_as_volumes(tmp_path):
    for shape, message in (((6, 3, 28, 28), "looks like channels first"), ((6, 28, 28, 28), "volumes")):
        name, _ = written(tmp_path, train_images=np.zeros(shape, np.uint8))
        with pytest.raises(UserError, match=message):
            load(name)

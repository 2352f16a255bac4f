"""Data sets of Hugging Face's library: made on disk here, as no hub can be reached."""

import io
import sys

import numpy as np
import pytest
from PIL import Image as Picture

from fl_sim.data import load, places
from fl_sim.errors import UserError

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FL_SIM_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def images(count, size=(6, 5), mode="L", **columns):
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    made = {"image": [Picture.new(mode, size, 7 * i) for i in range(count)], "label": [i % 2 for i in range(count)]}
    features |= {name: datasets.Value("string") for name in columns}
    return datasets.Dataset.from_dict({**made, **columns}, features=datasets.Features(features))


def saved(folder, **parts):
    datasets.DatasetDict(parts).save_to_disk(folder / "set")
    return f"hf:{folder}/set"


def test_images_labels_and_clients_are_inferred_and_shown(tmp_path):
    train, test = images(4, writer=["b", "a", "b", "a"]), images(2, writer=["a", "c"])
    found = load(saved(tmp_path, train=train, test=test, validation=images(3, writer=["a"] * 3)) + ":client=writer")
    assert found.train.inputs.shape == (4, 1, 5, 6)
    assert found.train.inputs[:, 0, 0, 0].tolist() == [0, 7, 14, 21]
    assert (found.train.groups.tolist(), found.test.groups.tolist()) == ([1, 0, 1, 0], [0, 2])
    assert len(found.sources) == 3
    assert (found.test.labels.tolist(), found.classes) == ([0, 1], ("cat", "dog"))
    assert found.note == (
        "images image; label label; 3 clients by writer; tested on its part test; its parts validation (3 records) are "
        "left out"
    )
    assert dict(found.shown) == {"image": "image: 6x5", "label": "label", "writer": "client: 3 clients"}


def test_a_single_part_is_split_by_a_share(tmp_path):
    images(10).save_to_disk(tmp_path / "one")
    found = load(f"hf:{tmp_path}/one:test=0.3:size=4x4")
    assert (len(found.train), len(found.test), found.input_shape) == (7, 3, (1, 4, 4))


def test_a_folder_of_parquet_is_a_table_as_a_parquet_file_is(tmp_path):
    columns = {
        "age": list(range(20)),
        "sex": ["f", "m"] * 10,
        "label": ["ill", "well"] * 10,
        "ward": ["n"] * 9 + ["s"] * 11,
    }
    (tmp_path / "folder").mkdir()
    datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "folder/train.parquet")
    settings = "client=ward:test=0.2:range.age=0..20"
    found = load(f"hf:{tmp_path}/folder:{settings}")
    same = load(f"parquet:{tmp_path}/folder/train.parquet:{settings}")
    np.testing.assert_array_equal(found.train.inputs, same.train.inputs)
    np.testing.assert_array_equal(found.test.groups, same.test.groups)
    assert found.shown == same.shown


@pytest.mark.parametrize(
    ("parts", "settings", "message"),
    [
        ({"train": images(4)}, "", "no setting says which records are for testing"),
        ({"train": images(4)}, ":test_part=valid", r"has no part 'valid'; set data\.test_part to one of train"),
        ({"train": images(4)}, ":test_part=train", r"data\.train_part and data\.test_part are both 'train'"),
        ({"train": images(4), "test": images(2, (7, 5))}, "", r"part test, record 1 has 7x5 pixels, but .* has 6x5"),
        ({"train": images(4), "test": images(2, mode="I;16")}, "", "record 1 has 16 bits per pixel"),
        ({"train": images(4), "test": images(2)}, ":image=picture", "no column 'picture'.*; its columns: image, label"),
        ({"train": images(4), "test": images(2)}, ":missing=drop", r"data\.missing is for tables"),
        ({"train": images(4), "test": images(2)}, ":client=who", "has no column 'who'"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_data_set_is_refused_in_one_line(tmp_path, parts, settings, message):
    with pytest.raises(UserError, match=message) as caught:
        load(saved(tmp_path, **parts) + settings)
    assert "\n" not in str(caught.value)


def test_several_labels_and_records_without_one_are_refused(tmp_path):
    features = datasets.Features({"x": datasets.Value("int64"), "label": datasets.Sequence(datasets.ClassLabel(2))})
    several = datasets.Dataset.from_dict({"x": [1, 2], "label": [[0], [0, 1]]}, features=features)
    with pytest.raises(UserError, match=r"several labels per record \(multi-label\) are not supported"):
        load(saved(tmp_path, train=several) + ":test=0.5")
    features = datasets.Features({"x": datasets.Value("int64"), "label": datasets.ClassLabel(names=["a", "b"])})
    part = datasets.Dataset.from_dict({"x": [1, 2, 3], "label": [0, 1, -1]}, features=features)
    part.save_to_disk(tmp_path / "unlabelled")
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(tmp_path / "both")
    with pytest.raises(UserError, match="records of class -1 have no label"):
        load(f"hf:{tmp_path}/both")


def test_what_is_not_on_this_machine_is_told_so_and_nothing_is_fetched_offline(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"hf:nobody/nothing .*FL_SIM_OFFLINE") as caught:
        load("hf:nobody/nothing")
    assert "\n" not in str(caught.value)


def test_a_missing_library_is_told(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"datasets, which is not installed .*: pip install 'fl-sim\[hf\]'"):
        load(f"hf:{tmp_path}")
    assert places.find(f"hf:{tmp_path}") is not None


def classified(names, present, count=60, **columns):
    """Make a table whose number ``a`` says the class: 0, 1, 2 for ant, bee, cow, whatever their codes are."""
    true = [present[i % len(present)] for i in range(count)]
    features = {"a": datasets.Value("float32"), "label": datasets.ClassLabel(names=names)}
    made = {"a": [float(["ant", "bee", "cow"].index(one)) for one in true], "label": [names.index(one) for one in true]}
    for name, (cells, feature) in columns.items():
        made[name], features[name] = [cells[i % len(cells)] for i in range(count)], feature
    return datasets.Dataset.from_dict(made, features=datasets.Features(features))


ALL = ["ant", "bee", "cow"]


@pytest.mark.parametrize("names", [["bee", "cow"], ["cow", "bee", "ant"], ["bee", "ant", "cow"]])
def test_classes_of_a_test_part_are_told_by_name_not_by_code(tmp_path, names):
    test = classified(names, [name for name in ALL if name in names])
    found = load(saved(tmp_path, train=classified(ALL, ALL), test=test))
    assert found.classes == ("ant", "bee", "cow")
    np.testing.assert_array_equal(found.test.inputs[:, 0], found.test.labels)
    assert any("codes of column 'label' stand for ant, bee, cow" in line for line in found.inferred)


def test_other_columns_of_classes_and_images_are_told_by_name_too(tmp_path):
    colours = [["red", "green"], ["green", "blue", "red"]]
    with pytest.raises(UserError, match=r"'blue'.* red, green,.* green, blue, red"):
        load(
            saved(
                tmp_path,
                train=classified(ALL, ALL, colour=([0, 1], datasets.ClassLabel(names=colours[0]))),
                test=classified(ALL, ALL, colour=([0, 1, 2], datasets.ClassLabel(names=colours[1]))),
            )
        )
    train = classified(ALL, ALL, colour=([0, 1], datasets.ClassLabel(names=colours[0])))
    test = classified(ALL, ALL, colour=([2, 0], datasets.ClassLabel(names=colours[1])))
    found = load(saved(tmp_path / "b", train=train, test=test))
    assert found.test.inputs[:, 1].tolist() == [0, 1] * 30  # red is 0 and green 1, as in the part to train on
    swapped = images(4).cast_column("label", datasets.ClassLabel(names=["dog", "cat"]))
    swapped = swapped.map(lambda row: {"label": 1 - row["label"]}).cast_column(
        "label", datasets.ClassLabel(names=["dog", "cat"])
    )
    pictures = load(saved(tmp_path / "c", train=images(4), test=swapped))
    assert pictures.test.labels.tolist() == pictures.train.labels.tolist() == [0, 1, 0, 1]


def test_classes_by_name_in_one_part_and_by_text_or_code_in_the_other(tmp_path):
    coded = classified(ALL, ALL)
    texts = coded.map(lambda row: {"label": ALL[row["label"]]}, features=datasets.Features(
        {"a": datasets.Value("float32"), "label": datasets.Value("string")}
    ))  # fmt: skip
    bare = coded.cast_column("label", datasets.Value("int64"))
    for place, (train, test) in enumerate(((coded, texts), (texts, coded))):
        found = load(saved(tmp_path / str(place), train=train, test=test) + ":label=label")
        assert found.classes == ("ant", "bee", "cow")
        np.testing.assert_array_equal(found.test.inputs[:, 0], found.test.labels)
    for place, (train, test) in enumerate(((coded, bare), (bare, coded))):
        with pytest.raises(UserError, match="codes without names"):
            load(saved(tmp_path / f"bare{place}", train=train, test=test) + ":label=label")


def test_class_names_belong_to_codes_where_some_codes_do_not_occur(tmp_path):
    names = ["ant", "bee", "cow"]
    part = classified(names, ["ant", "cow"])
    found = load(saved(tmp_path, train=part, test=part))
    assert found.classes == ("ant", "cow")
    assert found.test.labels.tolist()[:2] == [0, 1]


def test_whole_numbers_beyond_2_to_the_53_are_numbers(tmp_path):
    ids = ([2**53 + 1 + 2 * i for i in range(20)], datasets.Value("int64"))
    found = load(saved(tmp_path, train=classified(ALL, ALL, id=ids), test=classified(ALL, ALL, id=ids)))
    assert found.names == ("a", "id")
    assert found.train.inputs[0, 1] == np.float32(2**53 + 1)


def test_images_are_turned_as_their_exif_orientation_says(tmp_path):
    upright = np.arange(0, 240, 8, dtype=np.uint8).reshape(5, 6)

    def part(orientation, stored):
        buffer, exif = io.BytesIO(), Picture.Exif()
        exif[0x0112] = orientation
        Picture.fromarray(np.ascontiguousarray(stored)).save(buffer, "PNG", exif=exif)
        made = {"image": [{"bytes": buffer.getvalue(), "path": None}] * 4, "label": [0, 1] * 2}
        kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["top", "bottom"])}
        return datasets.Dataset.from_dict(made, features=datasets.Features(kinds))

    found = load(saved(tmp_path, train=part(1, upright), test=part(6, np.rot90(upright))))
    np.testing.assert_array_equal(found.test.inputs, found.train.inputs)
    assert "rotated or mirrored as their EXIF orientation says: 4 of 8 images" in found.inferred


def test_a_column_of_texts_becomes_tokens_and_classes_keep_their_names(tmp_path):
    texts = ["a good film", "a bad and dull film"] * 4
    features = datasets.Features(review=datasets.Value("string"), label=datasets.ClassLabel(names=["bad", "good"]))
    train, test = (
        datasets.Dataset.from_dict({"review": some, "label": [1, 0] * (len(some) // 2)}, features=features)
        for some in (texts, texts[:2])
    )
    found = load(f"{saved(tmp_path, train=train, test=test)}:text=review")
    assert (found.vocabulary, found.classes) == (257, ("bad", "good"))
    assert {found.text_of(row) for row in found.train.inputs[found.train.labels == 1]} == {texts[0]}
    assert (len(found.train), len(found.test)) == (8, 2)
    with pytest.raises(UserError, match=r"data\.tokenizer is for tables, but column 'image' contains images"):
        load(f"{saved(tmp_path / 'i', train=images(4), test=images(2))}:tokenizer=bytes")

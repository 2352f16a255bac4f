"""Data sets as Hugging Face's library ``datasets`` has them: a folder (save_to_disk, parquet, json), or the hub's name.

A column of images makes a data set of images; without one the columns are a table's (fl_sim.data.table).
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from fl_sim.data.dataset import own_dataset, read_off_classes
from fl_sim.data.naming import OwnName
from fl_sim.data.pictures import ImageSettings, Pixels, decoded, image_settings, stack_images
from fl_sim.data.table import TablePlan, TestPart, dataset_of, planned, rows_of, test_part_by_setting
from fl_sim.data.table_columns import roles_of
from fl_sim.data.table_file import ROWS, TableReader, pyarrow, table_of
from fl_sim.errors import UserError
from fl_sim.mistakes import guess, shortened
from fl_sim.own_code import in_one_line
from fl_sim.types import Dataset, Examples

_MOST_NAMES: Final = 20  # of parts, columns or classes in a message


def read(name: str, own: OwnName, path: Path) -> Dataset:
    """Return the data set at ``path``, a folder or a name on the hub. Raises UserError for what cannot be one.

    Trains on the part ``data.train_part`` ("train"), and tests on ``data.test_part`` ("test", if there is one), or on
    the share ``data.test`` of the former; the note says which parts are left out.
    """
    library = _library()
    parts = _parts(library, own, path)
    train, tested_on = _chosen(own, parts)
    held = test_part_by_setting(own)
    if tested_on:
        held = replace(held, other=f"its part {tested_on}")
    used = [train, *([tested_on] if tested_on else [])]
    columns = parts[train].features
    label = own.option("label") or _only(columns, library.ClassLabel, "label")
    own = replace(own, options={**own.options, **({"label": (label,)} if label else {})})
    image = own.option("image") or _only(columns, library.Image, "image")
    if image and image not in columns:
        raise UserError(
            f"data.image: {path} has no column {image!r}{guess(image, columns)}; its columns: {_list(columns)}"
        )
    tables = [_table(f"{path}, part {part}", parts[part], parts[train]) for part in used]
    if image:
        dataset = _with_images(name, own, [parts[part] for part in used], tables, held, image)
    else:
        dataset = dataset_of(name, own, tables, held)
    left_out = [f"{part} ({len(parts[part]):,} records)" for part in parts if part not in used]
    rest = f"its parts {', '.join(left_out)} are left out" if left_out else ""
    classes = _class_names(columns.get(own.option("label")), dataset.classes, str(path))
    inferred = (*dataset.inferred, *_told_codes(parts[train]))
    return replace(dataset, note="; ".join(filter(None, [dataset.note, rest])), classes=classes, inferred=inferred)


def _library() -> Any:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if _is_offline():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # which the library reads when it is imported
    try:
        import datasets  # noqa: PLC0415 (an extra, and slow to import)
    except ImportError as error:
        raise UserError(
            f"hf: data are read by datasets, which is not installed ({in_one_line(error)}): pip install 'fl-sim[hf]', "
            "or pip install datasets"
        ) from error
    datasets.disable_progress_bars()
    return datasets


def _is_offline() -> bool:
    return bool(os.environ.get("FL_SIM_OFFLINE"))


def _parts(library: Any, own: OwnName, path: Path) -> Mapping[str, Any]:
    """Return {part: its records}. Nothing is fetched where FL_SIM_OFFLINE is set."""
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            found = library.load_from_disk(str(path))
        else:
            only_here = library.DownloadConfig(local_files_only=True) if _is_offline() else None
            found = library.load_dataset(str(path), own.option("config") or None, download_config=only_here)
    except Exception as error:
        is_place = path.is_dir()
        way = (
            "wanted is what save_to_disk writes, or a folder of parquet, csv or json files"
            if is_place
            else "FL_SIM_OFFLINE is set, so nothing is fetched: name a folder, or unset it where there is a network"
            if _is_offline()
            else "is the name right, and is there a network? A folder on this machine serves, too"
        )
        raise UserError(f"hf:{own.place} cannot be read by datasets ({in_one_line(error)}); {way}") from error
    return {"train": found} if isinstance(found, library.Dataset) else found


def _chosen(own: OwnName, parts: Mapping[str, Any]) -> tuple[str, str]:
    """Return the part to train on, and the one to test on, empty where another setting says what is tested on."""
    train, test = own.option("train_part") or "train", own.option("test_part")
    if not test and "test" in parts and not own.option("test") and not own.option("split"):
        test = "test"
    for key, part in (("train_part", train), ("test_part", test)):
        if part and part not in parts:
            raise UserError(
                f"hf:{own.place} has no part {part!r}{guess(part, parts)}; set data.{key} to one of {_list(parts)}"
            )
    if train == test:
        raise UserError(f"data.train_part and data.test_part are both {train!r}; to hold some out, set data.test=0.2")
    return train, test


def _table(where: str, part: Any, first: Any) -> TableReader:
    """Return ``part`` with the codes of classes that ``first`` has, the part to train on: classes are told by name."""
    arrow = pyarrow()
    schema = part.features.arrow_schema.remove_metadata()
    for place, name in enumerate(schema.names):
        if _names_in(part, name) or _names_in(first, name):
            kind = arrow.int64() if _names_in(first, name) else arrow.string()
            schema = schema.set(place, arrow.field(name, kind))
    return table_of(where, schema, partial(_batches, where, part, first))


def _batches(where: str, part: Any, first: Any, columns: Sequence[str]) -> Iterator[Any]:
    coded = [name for name in columns if _names_in(part, name) or _names_in(first, name)]
    for given in part.select_columns([*columns]).with_format("arrow").iter(batch_size=ROWS):
        table = given.combine_chunks()
        for name in coded:
            cells = _by_name(f"{where}: column {name!r}", part, first, name, table.column(name).combine_chunks())
            place = table.column_names.index(name)
            table = table.set_column(place, name, _codes_of(cells, first, name))
        yield from table.combine_chunks().to_batches()


def _told_codes(first: Any) -> list[str]:
    """Say for each column of classes what its codes stand for."""
    return [
        f"codes of column {name!r} stand for {_list(_names_in(first, name))}; other parts are matched by these names"
        for name in first.column_names
        if _names_in(first, name)
    ]


def _by_name(where: str, part: Any, first: Any, name: str, cells: Any) -> Any:
    """Return the names of the classes that are in ``cells``, None where there is none."""
    arrow = pyarrow()
    own, others = _names_in(part, name), _names_in(first, name)
    if not own and not (arrow.types.is_string(cells.type) or arrow.types.is_large_string(cells.type)):
        raise UserError(f"{where} holds codes without names, and the part to train on names its classes; name both")
    if own and not others and not _is_text(first, name):
        raise UserError(f"{where} names its classes, and the part to train on has codes without names; name both")
    texts = arrow.array(own).take(_codes_or_none(cells, len(own))) if own else cells.cast(arrow.string())
    strangers = [] if not others else sorted({*texts.unique().drop_null().to_pylist()} - {*others})
    if strangers:
        raise UserError(
            f"{where} has the class {shortened(strangers[0])!r}, which the part to train on does not have: its classes "
            f"are {_list(others)}, and here {_list(own or strangers)}; rename them alike"
        )
    return texts


def _codes_of(texts: Any, first: Any, name: str) -> Any:
    """Return the codes of ``texts`` in the part to train on, -1 for no class; texts where it has no codes."""
    names = _names_in(first, name)
    if not names:
        return texts
    arrow = pyarrow()
    return arrow.compute.index_in(texts, value_set=arrow.array(names)).fill_null(-1).cast(arrow.int64())


def _codes_or_none(cells: Any, count: int) -> Any:
    compute = pyarrow().compute
    is_code = compute.and_(compute.greater_equal(cells, 0), compute.less(cells, count))
    return compute.if_else(is_code, cells, None)


def _names_in(part: Any, name: str) -> Sequence[str]:
    """Return what a part calls the classes of a column, nothing where it has no classes."""
    names: Sequence[str] = getattr(part.features.get(name), "names", None) or ()
    return names


def _is_text(part: Any, name: str) -> bool:
    return getattr(part.features.get(name), "dtype", "") in {"string", "large_string"}


def _only(columns: Mapping[str, Any], kind: type, usual: str) -> str:
    """Return the one column of a kind, or the one of several that has its usual name; empty where there is none."""
    found = [name for name, feature in columns.items() if isinstance(feature, kind)]
    return usual if usual in found else found[0] if len(found) == 1 else ""


def _with_images(
    name: str, own: OwnName, parts: Sequence[Any], tables: Sequence[TableReader], held: TestPart, image: str
) -> Dataset:
    for key in ("drop", "text", "scale", "missing"):
        if own.option(key):
            raise UserError(f"data.{key} is for tables, and the column {image!r} holds images; leave it out")
    wanted = image_settings(own)
    plan = planned(own, tables, roles_of(own, tables[0], with_features=False), held)
    rows = rows_of(plan)
    undecoded = [part.select_columns([image]).cast_column(image, _library().Image(decode=False)) for part in parts]
    stack = stack_images(_opened(undecoded, tables, image, wanted), len(rows.labels))
    images = stack.images
    records = Examples(images, rows.labels, rows.clients if plan.roles.client else None)
    train, test = (records.take(np.flatnonzero(mask)) for mask in (~rows.is_test, rows.is_test))
    half = (0.5,) * images.shape[1]
    listed = plan.classes if plan.listed else ()
    dataset = own_dataset(name, train, test, half, half, tables[0].where, listed=listed)
    shown = [(image, f"image: {images.shape[3]}x{images.shape[2]}"), (plan.roles.label, "label")]
    if plan.roles.client:
        shown.append((plan.roles.client, f"client: {len(plan.clients):,} of them"))
    return replace(
        dataset,
        note=_note(plan, image, wanted),
        classes=plan.classes,
        shown=tuple(shown),
        inferred=stack.inferred(),
        read_off=(*read_off_classes(plan.listed), *wanted.read_off),
    )


def _opened(parts: Sequence[Any], tables: Sequence[TableReader], image: str, wanted: ImageSettings) -> Iterator[Any]:
    for part, table in zip(parts, tables, strict=True):
        for number in range(len(part)):
            where = f"{table.where}, record {number + 1}"
            yield where, partial(_picture, part, number, image, where, wanted)


def _picture(part: Any, number: int, image: str, where: str, wanted: ImageSettings) -> Pixels:
    given = part[number][image]
    if given is None:
        raise UserError(f"{where}, column {image!r}: there is no image")
    try:
        return decoded(given["bytes"] or Path(given["path"]).read_bytes(), where, wanted)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{where}, column {image!r}: the image cannot be read ({in_one_line(error)})") from error


def _note(plan: TablePlan, image: str, wanted: ImageSettings) -> str:
    clients = f"{len(plan.clients):,} clients by {plan.roles.client}" if plan.clients else ""
    tested = plan.held.told(plan.roles.split, by_client=bool(plan.clients))
    return "; ".join(filter(None, [f"images {image}", f"label {plan.roles.label}", clients, wanted.told(), tested]))


def _class_names(label: Any, classes: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Return what the file calls its classes, where it says that. Raises UserError for records without a class."""
    names = getattr(label, "names", None)
    if names and "-1" in classes:
        raise UserError(f"{where}: records of class -1 have no label; name parts that are labelled, by data.test_part")
    return tuple(names[int(code)] for code in classes) if names else classes


def _list(names: Iterable[str]) -> str:
    found = [*names]
    more = f" and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
    return f"{', '.join(map(shortened, found[:_MOST_NAMES]))}{more}"

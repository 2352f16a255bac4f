"""Reads data sets with Hugging Face's ``datasets`` library: a local folder, or a name on the Hugging Face hub.

If a column contains images, the result is a data set of images, else a table (fl_sim.data.table). A "part" is a split
of the Hugging Face data set, such as train or test.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fl_sim.data.dataset import enumerated, own_dataset, read_off_classes
from fl_sim.data.naming import OwnName
from fl_sim.data.pictures import ImageSettings, Pixels, decoded, image_settings, stack_images
from fl_sim.data.table import TestPart, planned, rows_of, test_part_by_setting
from fl_sim.data.table_columns import roles_of
from fl_sim.data.table_file import ROWS, TableReader, pyarrow, table_of
from fl_sim.data.texts import dataset_of
from fl_sim.errors import UserError
from fl_sim.mistakes import guess, shortened
from fl_sim.own_code import in_one_line
from fl_sim.types import Dataset, Examples


def read(name: str, own: OwnName, path: Path) -> Dataset:
    """Read the data set ``path``, a local folder or a name on the hub. Raises UserError if the data set cannot be read.

    The setting ``data.train_part`` names the part with the training records (default: train). ``data.test_part`` names
    the part with the test records (default: test). If ``data.test`` is set, test records are drawn from the training
    part in place of a test part. The note of the result lists all unused parts.
    """
    library = _library()
    parts = _parts(library, own, path)
    train, tested_on = _chosen(own, parts)
    test_part = test_part_by_setting(own)
    if tested_on:
        test_part = replace(test_part, other=f"its part {tested_on}")
    used = [train, *([tested_on] if tested_on else [])]
    columns = parts[train].features
    label = own.option("label") or _only(columns, library.ClassLabel, "label")
    own = replace(own, options={**own.options, **({"label": (label,)} if label else {})})
    image = own.option("image") or _only(columns, library.Image, "image")
    if image and image not in columns:
        raise UserError(
            f"data.image: {path} has no column {image!r}{guess(image, columns)}; its columns: {enumerated(columns)}"
        )
    tables = [_table(f"{path}, part {part}", parts[part], parts[train]) for part in used]
    if image:
        dataset = _with_images(name, own, [parts[part] for part in used], tables, test_part, image)
    else:
        dataset = dataset_of(name, own, tables, test_part)
    left_out = [f"{part} ({len(parts[part]):,} records)" for part in parts if part not in used]
    rest = f"its parts {', '.join(left_out)} are left out" if left_out else ""
    codes = [
        f"codes of column {name!r} stand for {enumerated(names)}; codes of other parts are translated by these names"
        for name in parts[train].column_names
        if (names := _names_in(parts[train], name))
    ]
    return replace(
        dataset,
        note="; ".join(filter(None, [dataset.note, rest])),
        classes=_class_names(columns.get(own.option("label")), dataset.classes, str(path)),
        inferred=(*dataset.inferred, *codes),
    )


def _library() -> Any:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if os.environ.get("FL_SIM_OFFLINE"):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the import of ``datasets`` reads the variable HF_HUB_OFFLINE
    try:
        import datasets  # noqa: PLC0415 (an extra, and slow to import)
    except ImportError as error:
        raise UserError(
            f"data of kind hf need the library datasets, which is not installed ({in_one_line(error)}): "
            "pip install 'fl-sim[hf]', or pip install datasets"
        ) from error
    datasets.disable_progress_bars()
    return datasets


def _parts(library: Any, own: OwnName, path: Path) -> Mapping[str, Any]:
    """Return {name of a part, such as "train": its records}. Nothing is downloaded if FL_SIM_OFFLINE is set."""
    is_offline = bool(os.environ.get("FL_SIM_OFFLINE"))
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            found = library.load_from_disk(str(path))
        else:
            only_here = library.DownloadConfig(local_files_only=True) if is_offline else None
            found = library.load_dataset(str(path), own.option("config") or None, download_config=only_here)
    except Exception as error:
        way = (
            "give a folder that save_to_disk has written, or a folder of parquet, csv or json files"
            if path.is_dir()
            else "FL_SIM_OFFLINE is set, so nothing is downloaded: give a local folder, or unset FL_SIM_OFFLINE"
            if is_offline
            else "check the name and the network, or give a local folder"
        )
        raise UserError(f"hf:{own.place} cannot be read by datasets ({in_one_line(error)}); {way}") from error
    return {"train": found} if isinstance(found, library.Dataset) else found


def _chosen(own: OwnName, parts: Mapping[str, Any]) -> tuple[str, str]:
    """Return the names of the training part and of the test part.

    The name of the test part is "" if the setting ``data.test`` or ``data.split`` defines the test records.
    """
    train, test = own.option("train_part") or "train", own.option("test_part")
    if not test and "test" in parts and not own.option("test") and not own.option("split"):
        test = "test"
    for key, part in (("train_part", train), ("test_part", test)):
        if part and part not in parts:
            raise UserError(
                f"hf:{own.place} has no part {part!r}{guess(part, parts)}; set data.{key} to one of {enumerated(parts)}"
            )
    if train == test:
        raise UserError(
            f"data.train_part and data.test_part are both {train!r}; to test on a share of its records, set "
            "data.test=0.2 in place of data.test_part"
        )
    return train, test


def _table(where: str, part: Any, first: Any) -> TableReader:
    """Return the records of ``part`` (a split) as a table, with the class codes of the training part ``first``.

    Two parts may number their classes differently: cat 0 and dog 1, or dog 0 and cat 1. Therefore the codes of ``part``
    are converted by the names of the classes.
    """
    arrow = pyarrow()
    schema = part.features.arrow_schema.remove_metadata()
    for place, name in enumerate(schema.names):
        if _names_in(part, name) or _names_in(first, name):
            kind = arrow.int64() if _names_in(first, name) else arrow.string()
            schema = schema.set(place, arrow.field(name, kind))
    return table_of(where, schema, partial(_batches, where, part, first))


def _batches(where: str, part: Any, first: Any, columns: Sequence[str]) -> Iterator[Any]:
    for given in part.select_columns([*columns]).with_format("arrow").iter(batch_size=ROWS):
        table = given.combine_chunks()
        for name in columns:
            if _names_in(part, name) or _names_in(first, name):
                cells = _recoded(f"{where}: column {name!r}", part, first, name, table.column(name).combine_chunks())
                table = table.set_column(table.column_names.index(name), name, cells)
        yield from table.combine_chunks().to_batches()


def _recoded(where: str, part: Any, first: Any, name: str, cells: Any) -> Any:
    """Convert the classes in ``cells``, a column of ``part``, to the class codes of the training part ``first``.

    A cell without a class gets the code -1. If the training part contains class names in place of codes, the result is
    class names, too.
    """
    arrow = pyarrow()
    compute, kinds = arrow.compute, arrow.types
    own, others = _names_in(part, name), _names_in(first, name)
    if not own and not (kinds.is_string(cells.type) or kinds.is_large_string(cells.type)):
        raise UserError(
            f"{where} has class codes without names, but the training part has class names; store names in both parts"
        )
    is_text = getattr(first.features.get(name), "dtype", "") in {"string", "large_string"}
    if own and not others and not is_text:
        raise UserError(
            f"{where} has class names, but the training part has codes without names; store names in both parts"
        )
    if own:
        is_code = compute.and_(compute.greater_equal(cells, 0), compute.less(cells, len(own)))
        texts = arrow.array(own).take(compute.if_else(is_code, cells, None))
    else:
        texts = cells.cast(arrow.string())
    if not others:
        return texts
    if strangers := sorted({*texts.unique().drop_null().to_pylist()} - {*others}):
        raise UserError(
            f"{where} has the class {shortened(strangers[0])!r}, which the training part does not have. The training "
            f"part has {enumerated(others)}, this part has {enumerated(own or strangers)}; give both the same names"
        )
    return compute.index_in(texts, value_set=arrow.array(others)).fill_null(-1).cast(arrow.int64())


def _names_in(part: Any, name: str) -> Sequence[str]:
    names: Sequence[str] = getattr(part.features.get(name), "names", None) or ()
    return names


def _only(columns: Mapping[str, Any], kind: type, usual: str) -> str:
    """Return the name of the column of type ``kind``: the image or label column, if no setting names this column.

    If several columns have this type, the result is the column with the name ``usual`` (such as "label"). The result is
    "" if there is no such column.
    """
    found = [name for name, feature in columns.items() if isinstance(feature, kind)]
    return usual if usual in found else found[0] if len(found) == 1 else ""


def _with_images(
    name: str, own: OwnName, parts: Sequence[Any], tables: Sequence[TableReader], test_part: TestPart, image: str
) -> Dataset:
    for key in ("drop", "text", "scale", "missing", "tokenizer", "max_length", "alphabet"):
        if own.option(key):
            raise UserError(f"data.{key} is for tables, but column {image!r} contains images; leave data.{key} out")
    settings = image_settings(own)
    plan = planned(own, tables, roles_of(own, tables[0], with_features=False), test_part)
    rows = rows_of(plan)
    undecoded = [part.select_columns([image]).cast_column(image, _library().Image(decode=False)) for part in parts]
    opened = (
        (f"{table.where}, record {number + 1}", partial(_pixels, part, number, image, table.where, settings))
        for part, table in zip(undecoded, tables, strict=True)
        for number in range(len(part))
    )
    images, form = stack_images(opened, len(rows.labels))
    records = Examples(images, rows.labels, rows.clients if plan.roles.client else None)
    train, test = (records.take(np.flatnonzero(mask)) for mask in (~rows.is_test, rows.is_test))
    half = (0.5,) * images.shape[1]
    listed = plan.classes if plan.listed else ()
    dataset = own_dataset(name, train, test, half, half, plan.where, listed=listed)
    shown = [(image, f"image: {images.shape[3]}x{images.shape[2]}"), (plan.roles.label, "label")]
    if plan.roles.client:
        shown.append((plan.roles.client, f"client: {len(plan.clients):,} clients"))
    clients = f"{len(plan.clients):,} clients by {plan.roles.client}" if plan.clients else ""
    note = [f"images {image}", f"label {plan.roles.label}", clients, settings.described(), plan.test_records]
    return replace(
        dataset,
        note="; ".join(filter(None, note)),
        classes=plan.classes,
        sources=plan.clients,
        shown=tuple(shown),
        inferred=form,
        read_off=(*read_off_classes(plan.listed), *settings.read_off),
    )


def _pixels(part: Any, number: int, image: str, table: str, settings: ImageSettings) -> Pixels:
    where, given = f"{table}, record {number + 1}", part[number][image]
    if given is None:
        raise UserError(f"{where}, column {image!r}: the image is missing; add it, or remove the record")
    try:
        return decoded(given["bytes"] or Path(given["path"]).read_bytes(), where, settings)
    except UserError:
        raise
    except Exception as error:
        message = f"{where}, column {image!r}: the image cannot be read ({in_one_line(error)}); replace or remove it"
        raise UserError(message) from error


def _class_names(label: Any, classes: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Convert ``classes`` to class names. ``classes``: class codes that are written as texts, such as "0".

    ``label``: the type of the label column. If this type has no class names, ``classes`` are returned unchanged. Raises
    UserError for the code -1, which marks records without a label.
    """
    names = getattr(label, "names", None)
    if names and "-1" in classes:
        raise UserError(f"{where}: records of class -1 have no label; set data.test_part to a part with labels")
    return tuple(names[int(code)] for code in classes) if names else classes

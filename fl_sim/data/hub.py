"""Data sets as Hugging Face's library ``datasets`` has them: a folder (save_to_disk, parquet, json), or the hub's name.

A column of images makes a data set of images; without one the columns are a table's (fl_sim.data.table).
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_sim.data.checked import own_dataset
from fl_sim.data.naming import OwnName
from fl_sim.data.pictures import Wanted, pixels, stacked, wanted_by
from fl_sim.data.table import Plan, dataset_of, planned, rows_of
from fl_sim.data.table_file import ROWS, TableFile, table_of
from fl_sim.data.table_roles import roles_of
from fl_sim.data.testing_part import Held, held_by_setting
from fl_sim.errors import UserError
from fl_sim.import_path import in_one_line
from fl_sim.mistakes import guess
from fl_sim.types import Dataset, Examples


def read(name: str, own: OwnName, path: Path) -> Dataset:
    """Return the data set at ``path``, a folder or a name on the hub. Raises UserError for what cannot be one.

    Trains on the part ``data.train_part`` ("train"), and tests on ``data.test_part`` ("test", if there is one), or on
    the share ``data.test`` of the former; the note says which parts are left out.
    """
    library = _library()
    parts = _parts(library, own, path)
    train, tested_on = _chosen(own, parts)
    held = held_by_setting(own)
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
    tables = [_table(f"{path}, part {part}", parts[part]) for part in used]
    if image:
        dataset = _with_images(name, own, [parts[part] for part in used], tables, held, image)
    else:
        dataset = dataset_of(name, own, tables, held)
    left_out = [f"{part} ({len(parts[part]):,} records)" for part in parts if part not in used]
    rest = f"its parts {', '.join(left_out)} are left out" if left_out else ""
    classes = _class_names(columns.get(own.option("label")), dataset.classes, str(path))
    return replace(dataset, note="; ".join(filter(None, [dataset.note, rest])), classes=classes)


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


def _table(where: str, part: Any) -> TableFile:
    return table_of(where, part.features.arrow_schema, partial(_batches, part))


def _batches(part: Any, columns: Sequence[str]) -> Iterator[Any]:
    for table in part.select_columns([*columns]).with_format("arrow").iter(batch_size=ROWS):
        yield from table.combine_chunks().to_batches()


def _only(columns: Mapping[str, Any], kind: type, usual: str) -> str:
    """Return the one column of a kind, or the one of several that has its usual name; empty where there is none."""
    found = [name for name, feature in columns.items() if isinstance(feature, kind)]
    return usual if usual in found else found[0] if len(found) == 1 else ""


def _with_images(
    name: str, own: OwnName, parts: Sequence[Any], tables: Sequence[TableFile], held: Held, image: str
) -> Dataset:
    for key in ("drop", "text", "scale", "missing"):
        if own.option(key):
            raise UserError(f"data.{key} is for tables, and the column {image!r} holds images; leave it out")
    wanted = wanted_by(own)
    plan = planned(own, tables, roles_of(own, tables[0], with_features=False), held)
    rows = rows_of(plan)
    undecoded = [part.select_columns([image]).cast_column(image, _library().Image(decode=False)) for part in parts]
    images = stacked(_opened(undecoded, tables, image, wanted), len(rows.labels))
    records = Examples(images, rows.labels, rows.clients if plan.roles.client else None)
    train, test = (records.take(np.flatnonzero(mask)) for mask in (~rows.is_test, rows.is_test))
    half = (0.5,) * images.shape[1]
    dataset = own_dataset(name, train, test, half, half, tables[0].where)
    shown = [(image, f"image: {images.shape[3]}x{images.shape[2]}"), (plan.roles.label, "label")]
    if plan.roles.client:
        shown.append((plan.roles.client, f"client: {len(plan.clients):,} of them"))
    return replace(dataset, note=_note(plan, image, wanted), classes=plan.classes, shown=tuple(shown))


def _opened(parts: Sequence[Any], tables: Sequence[TableFile], image: str, wanted: Wanted) -> Iterator[Any]:
    for part, table in zip(parts, tables, strict=True):
        for number in range(len(part)):
            where = f"{table.where}, record {number + 1}"
            yield where, partial(_picture, part, number, image, where, wanted)


def _picture(part: Any, number: int, image: str, where: str, wanted: Wanted) -> NDArray[np.uint8]:
    from PIL import Image  # noqa: PLC0415 (only images need it)

    given = part[number][image]
    if given is None:
        raise UserError(f"{where}, column {image!r}: there is no image")
    try:
        with Image.open(BytesIO(given["bytes"]) if given["bytes"] else given["path"]) as opened:
            return pixels(opened, where, wanted)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{where}, column {image!r}: the image cannot be read ({in_one_line(error)})") from error


def _note(plan: Plan, image: str, wanted: Wanted) -> str:
    clients = f"{len(plan.clients):,} clients by {plan.roles.client}" if plan.clients else ""
    tested = plan.held.told(plan.roles.split, by_client=bool(plan.clients))
    return "; ".join(filter(None, [f"images {image}", f"label {plan.roles.label}", clients, wanted.told(), tested]))


def _class_names(label: Any, classes: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Return what the file calls its classes, where it says that. Raises UserError for records without a class."""
    names = getattr(label, "names", None)
    if names and "-1" in classes:
        raise UserError(f"{where}: records of class -1 have no label; name parts that are labelled, by data.test_part")
    return tuple(names[int(code)] for code in classes) if names else classes


def _list(names: Mapping[str, Any]) -> str:
    return ", ".join(names)

"""Reads npz files: copies of public data sets, the user's own files, and the files of MedMNIST.

The user's own files contain the arrays x_train, y_train, x_test and y_test. All arrays are checked before use.
Uncompressed images are memory-mapped, so they need not fit into memory. The optional arrays client_train (or groups)
and client_test contain the client of each record, as a whole number or text.
"""

import math
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_sim.data.dataset import (
    as_labels,
    known_dataset,
    listed_classes,
    looks_channels_first,
    most_bytes,
    own_dataset,
    read_off_classes,
    with_validation,
)
from fl_sim.data.naming import KnownSet, OwnName
from fl_sim.data.table_file import as_number, similar_spellings
from fl_sim.data.tokens import MOST_TOKENS, tokens_in
from fl_sim.errors import UserError
from fl_sim.mistakes import guess, shortened
from fl_sim.own_code import in_one_line
from fl_sim.types import Dataset, Examples

Arrays: TypeAlias = Mapping[str, NDArray[np.generic]]

CLIENTS: Final = ("client_train", "groups")
"""The two accepted names of the array with the client of each training record."""

REQUIRED = ("x_train", "y_train", "x_test", "y_test")
_JPEG = ("jpeg_train", "jpeg_test")
_OPTIONAL = (*CLIENTS, "client_test", "vocabulary", "mean", "std", "x_val", "y_val", *_JPEG)
_WORDS: Final = {
    **dict.fromkeys(("clients", "client", "users", "user", "writer", "writers"), "client_train"),
    **dict.fromkeys(("x_valid", "y_valid", "x_validation", "y_validation"), "x_val and y_val"),
    **dict.fromkeys(("x", "data", "images", "features"), "x_train and x_test"),
    **dict.fromkeys(("y", "labels", "targets"), "y_train and y_test"),
}
"""{array name in other programs: the name to use here}, for hints in error messages."""
_INPUTS: Final = ("x_train", "x_test", "x_val")
_LOCAL_HEADER_SIZE = 30

_LARGE: Final = 2**26
"""A size in bytes.

If the arrays of a file are larger in total, their lengths and compression are checked before any array is read.
"""
_MOST_PACKED: Final = 500  # largest plausible compression factor of an array; a higher one suggests a zip bomb

MEDMNIST: Final = ("train_images", "train_labels", "val_images", "val_labels", "test_images", "test_labels")
_USES: Final = ("leave", "train", "validate")


def read_known(path: Path, known: KnownSet) -> Dataset:
    """Read the npz file ``path``, a copy of the public data set ``known``, for example cifar10.npz."""
    arrays = read_arrays(path, REQUIRED, _OPTIONAL, others=True)
    train, test = with_clients(path, arrays, _examples(path, arrays, "train"), _examples(path, arrays, "test"))
    num_jpeg, total = sum(arrays[name].size for name in _JPEG if name in arrays), len(train) + len(test)
    copied = f"{100 * (1 - num_jpeg / total):.1f} % lossless copy ({num_jpeg} images decoded from JPEG)"
    return known_dataset(known, train, test, str(path), (copied,) if num_jpeg else ())


def read_own(name: str, own: OwnName, path: Path) -> Dataset:
    """Read the user's own npz file: uint8 images, float features, or tokens.

    Images have the shape (records, height, width) or (records, height, width, channels), features (records, features).
    Required arrays: ``x_train``, ``y_train``, ``x_test``, ``y_test``. Optional arrays: ``mean`` and ``std``, which
    normalise the inputs (one number, or one per channel, for pixel values between 0 and 1). Default: 0.5 and 0.5 for
    images, and no normalisation for features. Mean and standard deviation are never computed from the training records,
    because statistics of private records would be private, too. ``client_train`` (or ``groups``): the writer, hospital
    or device of each training record, for partition=natural. ``client_test``: the writer, hospital or device of each
    test record, for client accuracies. ``x_val`` and ``y_val``: validation records for ``evaluate.validation=given``.
    ``vocabulary``: a number V; inputs are then sequences of tokens 1 to V - 1, padded at the end with zeros. Raises
    UserError for any other array, because its name may be misspelt. Settings: ``data.classes`` lists public classes;
    ``data.values`` gives the two values of float images that become 0 and 255.
    """
    arrays, values = read_arrays(path, REQUIRED, _OPTIONAL), _values(own)
    if values:
        images = {name: _as_bytes(f"{path}: {name}", arrays[name], values) for name in _INPUTS if name in arrays}
        arrays = {**arrays, **images}
    vocabulary = _vocabulary(path, arrays)
    if vocabulary:
        inputs = [name for name in _INPUTS if name in arrays]
        arrays = {**arrays, **{name: tokens_in(f"{path}: {name}", arrays[name], vocabulary) for name in inputs}}
    train, test = with_clients(path, arrays, _examples(path, arrays, "train"), _examples(path, arrays, "test"))
    is_image = train.inputs.ndim == 4
    channels = train.inputs.shape[1]
    mean = _constants(path, arrays, "mean", channels, 0.5 if is_image else 0.0)
    std = _constants(path, arrays, "std", channels, 0.5 if is_image else 1.0)
    if min(std) <= 0:
        raise UserError(f"{path}: std must be above 0, got {min(std)}; use 1 for constant inputs")
    listed, inferred = listed_classes(own), images_inferred(arrays["x_train"].shape) if is_image else ()
    made = own_dataset(name, train, test, mean, std, str(path), listed=listed)
    clients = [arrays[key] for key in (*CLIENTS, "client_test") if key in arrays]
    names = sorted({str(one) for array in clients if array.dtype.kind == "U" for one in np.unique(array)})
    counted = tuple(filter(None, [similar_spellings("clients", names, with_names=False)]))
    note = f"values {values[0]:g}..{values[1]:g} became 0..255, whole numbers" if values else ""
    made = replace(made, vocabulary=vocabulary, inferred=inferred, read_off=read_off_classes(listed), counted=counted)
    made = replace(made, note=note, sources=tuple(names))
    given = [key for key in ("x_val", "y_val") if key in arrays]
    if len(given) == 1:
        raise UserError(f"{path} holds only {given[0]}; x_val and y_val go together: add the other one, or remove both")
    return with_validation(made, _examples(path, arrays, "val") if given else None, str(path))


def read_arrays(path: Path, required: Sequence[str], optional: Sequence[str] = (), *, others: bool = False) -> Arrays:
    """Return {name: array} of an npz file. Raises UserError if the file is damaged or lacks a ``required`` array.

    ``others``: True to ignore arrays that are neither required nor ``optional``, False to raise UserError for them.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            found = [info.filename.removesuffix(".npy") for info in archive.infolist()]
            members = dict(zip(found, archive.infolist(), strict=True))
            _check_names(path, found, required, None if others else (*required, *optional))
            wanted = [name for name in (*required, *optional) if name in members]
            shapes = {name: _shape(path, archive, members[name]) for name in wanted}
            if sum(members[name].file_size for name in wanted) > _LARGE:
                _check_lengths(path, shapes, required)
                _check_packing(path, [members[name] for name in wanted])
            return {name: _member(path, archive, members[name]) for name in wanted}
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{path} is no readable npz file ({in_one_line(error)}); it may be truncated: fetch or write it again"
        ) from error


def images_inferred(shape: tuple[int, ...]) -> tuple[str, ...]:
    """Describe which axes of an image array are height, width and channels, for ``Dataset.inferred``."""
    _, height, width = shape[:3]
    if len(shape) == 3:
        return (f"images are (records, height, width), here {height} high, {width} wide, grey",)
    channels = f"{shape[3]} channels" + (" (red, green, blue)" if shape[3] == 3 else "")
    return (f"images are (records, height, width, channels), here {height} high, {width} wide, {channels}",)


def images_of(where: str, array: NDArray[np.generic]) -> NDArray[np.uint8] | NDArray[np.float32]:
    """Convert inputs from a file to uint8 images (records, channels, height, width) or float32 features.

    Raises UserError for other types and shapes. ``where``: file and array, for the message.
    """
    if array.dtype == np.uint8 and array.ndim == 3:
        return array.astype(np.uint8, copy=False)[:, np.newaxis]
    if array.dtype == np.uint8 and array.ndim == 4:
        if looks_channels_first(array.shape):
            raise UserError(
                f"{where}: shape {array.shape} looks like channels first; save images as NHWC, channels last"
            )
        return array.astype(np.uint8, copy=False).transpose(0, 3, 1, 2)
    if array.dtype.kind == "f" and array.ndim == 2:
        with np.errstate(over="ignore"):  # numbers beyond float32 become infinite, and are refused below
            features = array.astype(np.float32, copy=False)
        finite = np.isfinite(features).all(axis=1)
        if not finite.all():
            raise UserError(
                f"{where}: {np.count_nonzero(~finite)} records are not finite, the first is {finite.argmin()}; remove "
                "them, or replace their infinite and missing numbers"
            )
        return features
    if array.dtype.kind in "iu" and array.ndim == 2 and array.dtype != np.uint8:
        raise UserError(
            f"{where}: {array.dtype} {array.shape}: save features as floats; for sequences of tokens add a number "
            "vocabulary (tokens are whole numbers from 1 to vocabulary - 1, and 0 is padding)"
        )
    if array.dtype.kind in "fiu" and array.ndim in {3, 4}:
        raise UserError(
            f"{where}: images are {array.dtype} {array.shape}, of unknown scale: set the values of black and white, "
            "for example data.values=0..1 (or 0..255, -1..1), or save the images as uint8 from 0 to 255"
        )
    raise UserError(
        f"{where}: {array.dtype} {array.shape} is neither uint8 images (records, height, width[, channels]), 0..255, "
        "nor float features (records, features)"
    )


def with_clients(
    path: Path, arrays: Mapping[str, NDArray[np.generic]], train: Examples, test: Examples
) -> tuple[Examples, Examples]:
    """Return copies of ``train`` and ``test`` that contain the client of each record, as a number in ``groups``.

    The clients are in the arrays client_train (or groups) and client_test of the file. Without these arrays, the
    records are returned unchanged.
    """
    given = [name for name in CLIENTS if name in arrays]

    def clients(name: str, records: Examples) -> NDArray[np.generic]:
        array = arrays[name]
        if array.dtype.kind not in "iuU" or array.shape != (len(records),):
            raise UserError(
                f"{path}: {name} is {array.dtype} of shape {array.shape}; it must have a whole number or a text for "
                f"each of {len(records)} records"
            )
        return array if array.dtype.kind == "U" else array.astype(np.int64)

    if len(given) > 1:
        raise UserError(f"{path} holds {' and '.join(given)}, two names of the same array; remove one of them")
    if not given and "client_test" in arrays:
        raise UserError(f"{path} holds client_test but no client_train; add client_train, or remove client_test")
    if not given:
        return train, test
    of_train = clients(given[0], train)
    if "client_test" not in arrays:
        return replace(train, groups=_numbers(of_train)), test
    of_test = clients("client_test", test)
    if of_train.dtype.kind != of_test.dtype.kind:
        raise UserError(
            f"{path}: {given[0]} is {of_train.dtype} and client_test is {of_test.dtype}; both must be whole numbers, "
            "or both texts"
        )
    numbers = _numbers(np.concatenate([of_train, of_test]))
    return replace(train, groups=numbers[: len(train)]), replace(test, groups=numbers[len(train) :])


def read_medmnist(name: str, own: OwnName, path: Path) -> Dataset:
    """Read one of MedMNIST's npz files: images with one label each.

    The images are normalised by mean 0.5 and standard deviation 0.5, as in MedMNIST's code. The setting ``data.val``
    decides the use of the validation images. "leave" (the default): the validation images are not used, and the data
    set's note states this. "train": the images are added to the training records. "validate": the images are validation
    records for ``evaluate.validation=given``. Raises UserError for several labels per image, for 3D volumes, and for
    files that are not MedMNIST's.
    """
    use = own.option("val") or "leave"
    if use not in _USES:
        raise UserError(f"data.val = {use!r}{guess(use, _USES)}; valid: {', '.join(_USES)}")
    arrays = read_arrays(path, MEDMNIST)
    train, val, test = (_medmnist_part(path, arrays, part) for part in ("train", "val", "test"))
    if use == "train":
        inputs, labels = (
            np.concatenate([getattr(part, what) for part in (train, val)]) for what in ("inputs", "labels")
        )
        train = Examples(inputs, labels)
    half = (0.5,) * train.inputs.shape[1]
    listed, taken = listed_classes(own), images_inferred(arrays["train_images"].shape)
    made = own_dataset(name, train, test, half, half, str(path), listed=listed)
    made = replace(made, inferred=taken, read_off=read_off_classes(listed))
    if use == "validate":
        return with_validation(made, val, str(path))
    note = f"its {len(val):,} validation images are {'trained on, too' if use == 'train' else 'left out'}"
    return replace(made, note=note)


def _check_names(path: Path, found: list[str], required: Sequence[str], known: Sequence[str] | None) -> None:
    """Raise UserError for an array that occurs twice, a missing ``required`` array, and an array with an unknown name.

    ``found``: the names of all arrays in the file. ``known``: the valid names; None if all names are valid.
    """
    name, count = Counter(found).most_common(1)[0] if found else ("", 0)
    if count > 1:
        raise UserError(
            f"{path} holds {count} arrays called {shortened(name)!r}; write the file again with only one of them"
        )
    if missing := [name for name in required if name not in found]:
        holds = ", ".join(found[:20]) or "nothing"
        pickled = "; to convert a client file of PFLlib, use the script in docs/porting.md" if found == ["data"] else ""
        raise UserError(
            f"{path} lacks {', '.join(missing)}; it holds {holds}, but must hold {', '.join(required)}{pickled}"
        )
    if known is not None and (others := [name for name in found if name not in known]):
        first = others[0]
        meant = f" (here: {_WORDS[first]})" if first in _WORDS else guess(first, known)
        raise UserError(
            f"{path} holds {', '.join(map(shortened, others[:20]))}, which fl-sim does not read{meant}; remove it, "
            f"or use one of the names {', '.join(known)}"
        )


def _values(own: OwnName) -> tuple[float, float] | None:
    if not (given := own.option("values")):
        return None
    low, _, high = given.partition("..")
    ends = as_number(low), as_number(high)
    if ends[0] is None or ends[1] is None or ends[0] >= ends[1]:
        raise UserError(f"data.values = {given!r}: write LOW..HIGH, two numbers, such as 0..1 or -1..1")
    return ends[0], ends[1]


def _as_bytes(where: str, array: NDArray[np.generic], values: tuple[float, float]) -> NDArray[np.uint8]:
    """Convert images of floats or wide integers to bytes. The two ``values`` (LOW, HIGH) become 0 and 255.

    Pixels below LOW become 0, and pixels above HIGH become 255.
    """
    if array.dtype.kind not in "fiu" or array.dtype == np.uint8 or array.ndim not in {3, 4}:
        raise UserError(
            f"{where} is {array.dtype} {array.shape}, but data.values is for images (records, height, width[, "
            "channels]) of floats or integers that are no bytes; leave data.values out"
        )
    images: NDArray[np.uint8] = np.empty(array.shape, np.uint8)
    low, high = values
    for place, image in enumerate(array):
        if not np.isfinite(image).all():
            raise UserError(f"{where}: record {place} has a pixel that is not finite; correct or remove the record")
        images[place] = np.rint((np.clip(image.astype(np.float64), low, high) - low) * (255 / (high - low)))
    return images


def _vocabulary(path: Path, arrays: Arrays) -> int:
    """Return the vocabulary size V of the file: tokens are 1 to V - 1, and 0 is padding.

    Return 0 if the records are not token sequences.
    """
    if "vocabulary" not in arrays:
        return 0
    given = arrays["vocabulary"]
    if given.dtype.kind not in "iu" or given.size != 1 or not 2 <= int(given.astype(np.int64).sum()) <= MOST_TOKENS:
        raise UserError(
            f"{path}: vocabulary must be one whole number from 2 to {MOST_TOKENS}; tokens are below it, 0 is padding"
        )
    if extra := [name for name in ("mean", "std") if name in arrays]:
        raise UserError(f"{path}: tokens (vocabulary is set) are not normalised; remove the array {extra[0]}")
    return int(given.astype(np.int64).sum())


def _shape(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[int, ...]:
    """Return the shape in the header of one array of the file, without reading the array.

    Raises UserError if the array has another size than its header states, or is too large for the memory.
    """
    where = f"{path}: {info.filename}"
    try:
        with archive.open(info) as file:
            version = np.lib.format.read_magic(file)
            reads = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, _, dtype = reads[version](file)
            if dtype.hasobject:
                raise ValueError("it holds pickled objects, which are never loaded")  # noqa: TRY301 (one message)
            num_bytes = file.tell() + int(math.prod(shape)) * dtype.itemsize
    except Exception as error:
        raise _unreadable(where, error) from error
    if num_bytes != info.file_size:
        raise UserError(
            f"{where} has {info.file_size:,} bytes, but its header says {num_bytes:,}; write the file again with "
            "numpy.savez"
        )
    if info.file_size > most_bytes():
        raise UserError(
            f"{where} takes {info.file_size:,} bytes, more than half of this machine's memory; use fewer records"
        )
    return tuple(shape)


def _check_packing(path: Path, members: Sequence[zipfile.ZipInfo]) -> None:
    """Raise UserError for an array with an extreme compression factor, which may be a zip bomb."""
    for info in members:
        if info.file_size > max(_LARGE, _MOST_PACKED * info.compress_size):
            raise UserError(
                f"{path}: {info.filename} takes {info.compress_size:,} bytes in the file but {info.file_size:,} in "
                "memory, so it repeats the same few bytes; if its records are real, write the file without "
                "compression, with numpy.savez"
            )


def _check_lengths(path: Path, shapes: Mapping[str, tuple[int, ...]], required: Sequence[str]) -> None:
    """Raise UserError if arrays that must be equally long, such as inputs and labels, differ in length.

    The lengths are those in the headers of the arrays, so no array is read.
    """
    lengths = {name: shape[0] if shape else 1 for name, shape in shapes.items()}
    pairs = [*zip(required[::2], required[1::2], strict=True), ("x_val", "y_val")]
    pairs += [("x_train", name) for name in CLIENTS] + [("x_test", "client_test")]
    for first, second in pairs:
        if first in lengths and second in lengths and lengths[first] != lengths[second]:
            raise UserError(
                f"{path}: {lengths[first]:,} records in {first} but {lengths[second]:,} in {second}; both must have "
                "the same number"
            )
    for name in ("mean", "std", "vocabulary"):
        if name in shapes and math.prod(shapes[name]) > max(1, math.prod(shapes[required[0]][1:])):
            raise UserError(f"{path}: {name} has shape {shapes[name]}; it must be one number, or one per channel")


def _member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[np.generic]:
    where = f"{path}: {info.filename}"
    try:
        if info.compress_type == zipfile.ZIP_STORED and (mapped := _map(path, info)) is not None:
            return mapped
        with archive.open(info) as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except Exception as error:
        raise _unreadable(where, error) from error


def _unreadable(where: str, error: Exception) -> UserError:
    return UserError(f"{where} cannot be read ({in_one_line(error)}); write the file again with numpy.savez")


def _map(path: Path, info: zipfile.ZipInfo) -> NDArray[np.generic] | None:
    """Return a memory map of one uncompressed array (``info``) in the npz file; None if no map is possible.

    Only uint8 arrays are mapped. Arrays with larger elements may start at an address that is no multiple of the
    element's size, because a zip file does not align its members. torch needs aligned arrays.
    """
    with path.open("rb") as file:
        file.seek(info.header_offset)
        header = file.read(_LOCAL_HEADER_SIZE)
        name_length, extra_length = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        start = info.header_offset + _LOCAL_HEADER_SIZE + name_length + extra_length
        file.seek(start)
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            return None
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
        offset = file.tell()
    if dtype != np.uint8 or offset + math.prod(shape) != start + info.file_size or 0 in shape:
        return None
    return np.memmap(path, dtype, "r", offset, shape, "F" if fortran_order else "C").view(np.ndarray)


def _examples(path: Path, arrays: Arrays, split: str) -> Examples:
    x, y = f"x_{split}", f"y_{split}"
    return Examples(images_of(f"{path}: {x}", arrays[x]), as_labels(arrays[y], f"{path}: {y}"))


def _constants(path: Path, arrays: Arrays, name: str, channels: int, default: float) -> tuple[float, ...]:
    if name not in arrays:
        return (default,) * channels
    array = arrays[name]
    if array.dtype.kind not in "fiu" or array.size not in {1, channels}:
        raise UserError(f"{path}: {name} must be one number or {channels} numbers, got {array.dtype} {array.shape}")
    values = array.astype(np.float64).ravel()
    if not np.isfinite(values).all():
        raise UserError(f"{path}: {name} is not finite: {values.tolist()}; store finite numbers")
    return tuple(float(value) for value in np.broadcast_to(values, channels))


def _numbers(clients: NDArray[np.generic]) -> NDArray[np.int64]:
    """Convert the client of each record, a text or a number, to int64. Equal texts get equal numbers."""
    if clients.dtype.kind != "U":
        return clients.astype(np.int64)
    numbers: NDArray[np.int64] = np.unique(clients, return_inverse=True)[1].astype(np.int64)
    return numbers


def _medmnist_part(path: Path, arrays: Arrays, part: str) -> Examples:
    x, y = f"{part}_images", f"{part}_labels"
    images, labels = arrays[x], arrays[y]
    inputs = images_of(f"{path}: {x}", images)
    if images.ndim == 4 and images.shape[3] not in {1, 3, 4}:
        raise UserError(f"{path}: {x} has shape {images.shape}: volumes (MedMNIST's 3D sets) are not supported")
    if inputs.dtype != np.uint8:
        raise UserError(f"{path}: {x} is {images.dtype} of shape {images.shape}; it must hold uint8 images")
    if labels.ndim == 2 and labels.shape[1] > 1:
        raise UserError(
            f"{path}: {y} has {labels.shape[1]} labels per image (multi-label, as in ChestMNIST), which is not "
            "supported; use one of MedMNIST's data sets with one class per image"
        )
    if labels.dtype.kind not in "iu" or labels.ndim not in {1, 2}:
        raise UserError(
            f"{path}: {y} is {labels.dtype} of shape {labels.shape}; it must hold one class per image, as a whole "
            "number; other targets (regression) are not supported"
        )
    return Examples(inputs, labels.reshape(-1).astype(np.int64))

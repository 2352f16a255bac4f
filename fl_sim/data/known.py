"""The public data sets known by name: their files in torchvision's layout, their sizes, their published constants."""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from fl_sim.same_records import FINER, records_of

Layout: TypeAlias = Literal["embedded", "idx", "cifar", "mat", "uci", "npz", "own"]

DIGITS = "digits"


@dataclass(frozen=True)
class KnownSet:
    """What is public about a data set.

    ``files``: {path below the root: MD5 of the unpacked file, or None where torchvision holds the MD5}. ``mean`` and
    ``std``: the published constants of the training images, one float per channel in units of 1. ``torchvision_class``
    is empty where torchvision cannot fetch the set. ``merged``: where the set is another's records, which of its own
    classes each class of the other is part of.
    """

    name: str
    torchvision_class: str
    layout: Layout
    files: dict[str, str | None]
    num_classes: int
    shape: tuple[int, ...]
    num_train: int
    num_test: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    merged: tuple[int, ...] = ()

    @property
    def finer(self) -> str:
        """Return the set with the same records in more classes, whose files this one is read from; empty for most."""
        return FINER.get(self.name, "")

    @property
    def npz_names(self) -> tuple[str, ...]:
        """Return the file names under which a root may hold the set as one npz; none for tables of numbers."""
        if self.layout == "uci":
            return ()
        name = records_of(self.name)
        return tuple(dict.fromkeys((f"{name}.npz", f"{name.replace('-', '_')}.npz")))


# torchvision publishes the MD5s of the idx files' .gz archives; these are those of what comes out of them.
_MNIST_FILES: dict[str, str | None] = {
    "MNIST/raw/train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "MNIST/raw/train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "MNIST/raw/t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "MNIST/raw/t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
_FASHION_MNIST_FILES: dict[str, str | None] = {
    "FashionMNIST/raw/train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "FashionMNIST/raw/train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "FashionMNIST/raw/t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "FashionMNIST/raw/t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}
_CIFAR10_FILES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")

_CIFAR100 = KnownSet(
    "cifar100", "CIFAR100", "cifar", {f"cifar-100-python/{file}": None for file in ("train", "test", "meta")},
    num_classes=100, shape=(3, 32, 32), num_train=50_000, num_test=10_000,
    mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762),
)  # fmt: skip
# Krizhevsky 2009, section 3.1: five classes are a superclass, both in alphabetical order.
_SUPERCLASSES = (
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7,
    6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10,
    16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16,
    12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13,
)  # fmt: skip

_ALL = (
    KnownSet(
        "mnist", "MNIST", "idx", _MNIST_FILES,
        num_classes=10, shape=(1, 28, 28), num_train=60_000, num_test=10_000, mean=(0.1307,), std=(0.3081,),
    ),
    KnownSet(
        "fashion-mnist", "FashionMNIST", "idx", _FASHION_MNIST_FILES,
        num_classes=10, shape=(1, 28, 28), num_train=60_000, num_test=10_000, mean=(0.2860,), std=(0.3530,),
    ),
    KnownSet(
        "cifar10", "CIFAR10", "cifar",
        {f"cifar-10-batches-py/{file}": None for file in (*_CIFAR10_FILES, "batches.meta")},
        num_classes=10, shape=(3, 32, 32), num_train=50_000, num_test=10_000,
        mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616),
    ),
    _CIFAR100,
    replace(_CIFAR100, name="cifar100-coarse", num_classes=20, merged=_SUPERCLASSES),
    KnownSet(
        "svhn", "SVHN", "mat", {"train_32x32.mat": None, "test_32x32.mat": None},
        num_classes=10, shape=(3, 32, 32), num_train=73_257, num_test=26_032,
        mean=(0.4377, 0.4438, 0.4728), std=(0.1980, 0.2010, 0.1970),
    ),
    KnownSet(
        "adult", "", "uci",
        {"uci/adult.data": "5d7c39d7b8804f071cdd1f2a7c460872", "uci/adult.test": "35238206dfdf7f1fe215bbb874adecdc"},
        num_classes=2, shape=(61,), num_train=32_561, num_test=16_281, mean=(0.0,), std=(1.0,),
    ),
    KnownSet(
        "diabetes", "", "uci", {"uci/diabetic_data.csv": "502f0cc004e4cf71536ec2e61596e42f"},
        num_classes=2, shape=(165,), num_train=81_275, num_test=20_491, mean=(0.0,), std=(1.0,),
    ),
)  # fmt: skip

_TUNED_ON = {
    "mnist": (
        "the defaults of PATE's teachers and students, those of DA-FL's generators, calibrate.clipping_norm, how "
        "features=whitened-scattering whitens, and the settings of the benchmarks"
    ),
    "fashion-mnist": (
        "the settings of the benchmark of Global DP on public features, and whether images that DA-FL's generator "
        "mean-embedding draws are warped"
    ),
    "cifar10": (
        "the radius of DA-FL's generator gaussian, how coarse DA-FL's generator mean-embedding takes colours to be, "
        "and how features=whitened-scattering whitens"
    ),
    DIGITS: "how many synthetic records the preset digits asks clients for",
}

KNOWN: dict[str, KnownSet] = {known.name: known for known in _ALL}
NAMES: tuple[str, ...] = (DIGITS, *KNOWN)
"""The names ``load`` takes, beside those of the user's own files (fl_sim.data.naming)."""


def tuned_on(data: str) -> str:
    """Say which of our settings were chosen by looking at the training records of ``data``; nothing where none were.

    A sentence for what an epsilon does not cover, with a space before it: a choice is a release that nobody paid for.
    """
    if (records := records_of(data)) not in _TUNED_ON:
        return ""
    return f" Choices made beforehand on these training records by this project: {_TUNED_ON[records]}."

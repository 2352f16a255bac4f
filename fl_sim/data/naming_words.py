"""What the settings of the user's own records take and mean, in words, for whoever asks: (what it takes, meaning)."""

from collections.abc import Mapping
from typing import Final

ABOUT: Final[Mapping[str, str]] = {
    "csv": "A table in a csv file, a row a record.",
    "parquet": "A table in a parquet file, a row a record.",
    "npz": "Arrays in an npz file: x_train, y_train, x_test, y_test.",
    "folder": "Images in folders: train/CLASS/*.png and test/CLASS/*.png.",
    "leaf": "LEAF's json files, in the folders train and test.",
    "medmnist": "MedMNIST's npz files.",
    "hf": "What Hugging Face's datasets reads: a folder, or a name on its hub.",
}
"""{kind: what it reads}"""

SETTINGS: Final[Mapping[str, tuple[str, str]]] = {
    "label": ("a column", "The column with the class, texts or whole numbers; left out: the one called label."),
    "classes": ("names, with + between", "The classes, in order, or their number; left out: read off the records."),
    "client": ("a column", "The column with the client, for partition=natural; left out: client, if there is one."),
    "split": ("a column", "A column that says train or test; left out: the one called split, if any."),
    "test": ("number, above 0, below 1", "The share of records for testing, of every client's if known."),
    "test_seed": ("whole number", "Which records are for testing; 0 where it is left out."),
    "test_file": ("text", "Another file with the same columns, all of which is for testing."),
    "drop": ("columns, with + between", "Columns to leave out."),
    "text": ("columns, with + between", "Columns of numbers that are names, such as postal codes."),
    "range": ("LEAST..MOST", "As data.range.COLUMN: the ends of its numbers, which become 0 and 1."),
    "category": ("names, with + between", "As data.category.COLUMN: the categories that count; others become zeros."),
    "scale": ("records", "Numbers without a range are scaled by mean and deviation of the training records."),
    "missing": ("drop", "Records with an empty cell are left out; without this they are refused."),
    "delimiter": ("comma, semicolon, tab or bar", "What stands between the cells of a csv file."),
    "decimal": ("point or comma", "The decimal sign of a csv file's numbers; point where it is left out."),
    "thousands": ("comma, point, space or apostrophe", "The sign between a csv file's thousands, if any."),
    "alphabet": ("text", "The characters of texts, in order, each once; left out: LEAF's 80."),
    "size": ("WIDTHxHEIGHT", "The size that images are scaled to; without it all must be of one size."),
    "values": ("LEAST..MOST", "Which values of images of 16 bits become 0 and 255."),
    "val": ("train", "The validation images are trained on, too; without this they are left out."),
    "image": ("a column", "The column of images, where there are several."),
    "config": ("text", "Which configuration, where a data set has several."),
    "train_part": ("text", "The part that is trained on; left out: train."),
    "test_part": ("text", "The part that is tested on; left out: test, where there is one."),
}  # fmt: skip
"""{setting: (what it takes, its meaning)}; each is written ``data.SETTING``."""

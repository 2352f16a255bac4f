"""Reads classification data sets by their names. A process reads each data set once, and stores images as bytes."""

from fl_sim.data.features import Features, version_of
from fl_sim.data.naming import NAMES, is_own, tuned_on
from fl_sim.data.places import DataSource, Root, describe_missing, find, roots, wanted_files
from fl_sim.data.reading import Check, content_of, contents_of, fingerprint, load, read, sealed_content, verify

__all__ = [
    "NAMES",
    "Check",
    "DataSource",
    "Features",
    "Root",
    "content_of",
    "contents_of",
    "describe_missing",
    "find",
    "fingerprint",
    "is_own",
    "load",
    "read",
    "roots",
    "sealed_content",
    "tuned_on",
    "verify",
    "version_of",
    "wanted_files",
]

"""Encryption for workers on other machines, and the user's own modules there."""

import importlib
import sys

import numpy as np
import pytest
from numpy.typing import NDArray

from fl_sim.engines.remote import Encryption, encrypted_bytes, importable
from fl_sim.errors import RunError


def changed(content: NDArray[np.uint8], place: int) -> NDArray[np.uint8]:
    other = content.copy()
    other[place] ^= 1
    return other


def test_nobody_without_the_key_reads_or_changes_what_is_closed() -> None:
    envelopes, record = Encryption.with_new_key(), np.arange(200, dtype=np.uint8)
    closed = envelopes.encrypt({"records": record})
    whole, sizes, content = closed
    secrets = record.tobytes()[:16], b"records", envelopes.key
    assert not [secret for secret in secrets if secret in content.tobytes()]
    opened = envelopes.decrypt(closed)["records"]
    assert np.array_equal(opened, record)
    assert opened.flags.writeable
    other_whole, _, other = envelopes.encrypt({"records": record})
    assert encrypted_bytes(closed) == len(content) == len(other) > 200
    frame, numbers = np.split(content, sizes[:1])
    other_frame, other_numbers = np.split(other, sizes[:1])
    assert other_frame[-16:].tobytes() != frame[-16:].tobytes()
    for by, came in (
        *((envelopes, (whole, sizes, changed(content, place))) for place in (0, 12, sizes[0] - 1, sizes[0], -1)),
        (envelopes, (whole, sizes, np.concatenate([frame, other_numbers]))),
        (envelopes, (whole, sizes, np.concatenate([other_frame, numbers]))),
        (envelopes, (other_whole, sizes, content)),
        (envelopes, (whole, sizes[::-1], np.concatenate([numbers, frame]))),
        (envelopes, (whole, [sizes[0] + 1, sizes[1] - 1], content)),
        (envelopes, (whole, sizes, content[:-1])),
        (envelopes, (whole, sizes[:1], frame)),
        (envelopes, (whole, [8], content[:8])),
        (envelopes, (whole, [], content)),
        (envelopes, (whole, [], content[:0])),
        (Encryption.with_new_key(), closed),
    ):
        with pytest.raises(RunError, match="was changed in transit"):
            by.decrypt(came)
    assert "key" not in repr(envelopes)


def test_on_ones_own_machine_values_stay_as_they_are() -> None:
    value = object()
    assert Encryption().decrypt(Encryption().encrypt(value)) is value


SOURCES = {
    "sent_alone.py": b"from sent_package.inner import NUMBER\n",
    "sent_package/__init__.py": b"",
    "sent_package/inner.py": b"NUMBER = 7\n",
    "json.py": b"raise RuntimeError('this shadows what is there')\n",
}


def test_a_file_and_a_package_are_imported_from_memory_and_shadow_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in ("json", "sent_alone", "sent_package", "sent_package.inner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importable(SOURCES)
    assert importlib.import_module("sent_alone").NUMBER == 7
    assert importlib.import_module("json").dumps(1) == "1"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("sent_package.absent")


def test_without_sources_nothing_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(sys.meta_path)
    monkeypatch.setattr(sys, "meta_path", list(before))
    importable({})
    assert sys.meta_path == before

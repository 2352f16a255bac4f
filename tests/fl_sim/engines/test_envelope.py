"""What goes through others' memory and onto their disks is closed."""

import numpy as np
import pytest
from numpy.typing import NDArray

from fl_sim.engines.envelope import Envelopes, num_bytes
from fl_sim.errors import RunError


def changed(content: NDArray[np.uint8], place: int) -> NDArray[np.uint8]:
    other = content.copy()
    other[place] ^= 1
    return other


def test_nobody_without_the_key_reads_or_changes_what_is_closed() -> None:
    envelopes, record = Envelopes.closed(), np.arange(200, dtype=np.uint8)
    closed = envelopes.close({"records": record})
    whole, sizes, content = closed
    secrets = record.tobytes()[:16], b"records", envelopes.key
    assert not [secret for secret in secrets if secret in content.tobytes()]
    opened = envelopes.open(closed)["records"]
    assert np.array_equal(opened, record)
    assert opened.flags.writeable
    other_whole, _, other = envelopes.close({"records": record})
    assert num_bytes(closed) == len(content) == len(other) > 200
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
        (Envelopes.closed(), closed),
    ):
        with pytest.raises(RunError, match="was changed on its way"):
            by.open(came)
    assert "key" not in repr(envelopes)


def test_on_ones_own_machine_values_stay_as_they_are() -> None:
    value = object()
    assert Envelopes().open(Envelopes().close(value)) is value

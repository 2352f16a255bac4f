"""What goes through others' memory and onto their disks is closed."""

import numpy as np
import pytest

from fl_sim.engines.envelope import Envelopes
from fl_sim.errors import RunError


def test_nobody_without_the_key_reads_or_changes_what_is_closed() -> None:
    envelopes, record = Envelopes.closed(), np.arange(200, dtype=np.uint8)
    closed = envelopes.close({"records": record})
    whole, (frame, numbers) = closed
    seen = b"".join(content.tobytes() for _, content in (frame, numbers))
    assert not [secret for secret in (record.tobytes()[:16], b"records", envelopes.key) if secret in seen]
    opened = envelopes.open(closed)["records"]
    assert np.array_equal(opened, record)
    assert opened.flags.writeable
    other_whole, (other_frame, other_numbers) = envelopes.close({"records": record})
    assert other_frame[1].tobytes() != frame[1].tobytes()
    changed = numbers[1].copy()
    changed[-1] ^= 1
    for by, came in (
        (envelopes, (whole, [frame, (numbers[0], changed)])),
        (envelopes, (whole, [frame, other_numbers])),
        (envelopes, (whole, [other_frame, numbers])),
        (envelopes, (other_whole, [frame, numbers])),
        (envelopes, (whole, [numbers, frame])),
        (envelopes, (whole, [frame])),
        (envelopes, (whole, [])),
        (Envelopes.closed(), closed),
    ):
        with pytest.raises(RunError, match="was changed on its way"):
            by.open(came)
    assert "key" not in repr(envelopes)


def test_on_ones_own_machine_values_stay_as_they_are() -> None:
    value = object()
    assert Envelopes().open(Envelopes().close(value)) is value

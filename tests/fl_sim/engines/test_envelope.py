"""What goes through others' memory and onto their disks is closed."""

import numpy as np
import pytest

from fl_sim.engines.envelope import Envelopes
from fl_sim.errors import RunError


def test_nobody_without_the_key_reads_or_changes_what_is_closed() -> None:
    envelopes, record = Envelopes.closed(), np.arange(200, dtype=np.uint8)
    closed = envelopes.close({"records": record})
    nonce, content = closed
    assert not [secret for secret in (record.tobytes()[:16], b"records", envelopes.key) if secret in content]
    assert np.array_equal(envelopes.open(closed)["records"], record)
    assert closed != envelopes.close({"records": record})
    changed = content[:-1] + bytes([content[-1] ^ 1])
    for by, came in ((envelopes, (nonce, changed)), (Envelopes.closed(), closed)):
        with pytest.raises(RunError, match="was changed on its way"):
            by.open(came)
    assert "key" not in repr(envelopes)


def test_on_ones_own_machine_values_stay_as_they_are() -> None:
    value = object()
    assert Envelopes().open(Envelopes().close(value)) is value

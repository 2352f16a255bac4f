"""Who computes the steps of the small networks: compiled code, or PyTorch."""

import pytest

from clients.dafl.dpcgan import nets
from fl_sim.native.kernel import load_kernel


@pytest.fixture(params=["compiled", "pytorch"])
def computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Take the test's steps by the one, and then by the other."""
    kernel, why_not = load_kernel()
    if request.param == "compiled" and kernel is None:
        pytest.skip(why_not)
    if request.param == "pytorch":
        monkeypatch.setattr(nets, "load_kernel", lambda: (None, "asked for"))
    return str(request.param)

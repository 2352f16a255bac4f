"""What is printed about a loss is never below it."""

from hypothesis import given
from hypothesis import strategies as st

from fl_sim.privacy.rounding import rounded_up


@given(st.floats(0, 1e300), st.integers(2, 6))
def test_a_printed_epsilon_is_never_below_the_epsilon_and_close_to_it(epsilon: float, digits: int) -> None:
    printed = float(rounded_up(epsilon, digits))
    assert epsilon <= printed <= epsilon * (1 + 10.0 ** (1 - digits)) + 1e-320


def test_figures_read_as_expected() -> None:
    assert [rounded_up(epsilon) for epsilon in (0.0, 8.0, 0.1, 2.34501, 1e-9, 123456.0)] == [
        "0", "8", "0.1", "2.346", "1e-09", "1.235e+05",
    ]  # fmt: skip

"""A printed loss is never below it, and a delta is compared with the population."""

from hypothesis import given
from hypothesis import strategies as st

from fl_sim.privacy.terms import delta_advice, rounded_up


@given(st.floats(0, 1e300), st.integers(2, 6))
def test_a_printed_epsilon_is_never_below_the_epsilon_and_close_to_it(epsilon: float, digits: int) -> None:
    printed = float(rounded_up(epsilon, digits))
    assert epsilon <= printed <= epsilon * (1 + 10.0 ** (1 - digits)) + 1e-320


def test_figures_read_as_expected() -> None:
    assert [rounded_up(epsilon) for epsilon in (0.0, 8.0, 0.1, 2.34501, 1e-9, 123456.0)] == [
        "0", "8", "0.1", "2.346", "1e-09", "1.235e+05",
    ]  # fmt: skip


def test_delta_is_measured_against_the_population() -> None:
    assert delta_advice(1e-5, 10_000) is None
    assert "is large" in (delta_advice(5e-5, 10_000) or "")
    for delta in (1e-3, 1e-2):
        advice = delta_advice(delta, 1000) or ""
        assert "not below 1 / 1000" in advice
        assert "0.0001" in advice

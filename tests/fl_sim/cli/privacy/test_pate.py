"""``fl-sim privacy pate``: anybody's votes, one JSON object, and files that are no votes."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fl_sim.cli.privacy import app
from fl_sim.cli.privacy.pate import PRIVATE
from fl_sim.errors import UserError

LNMAX = ("--mechanism", "lnmax", "--gamma", "0.05")
GNMAX = ("--mechanism", "gnmax", "--sigma", "40")
CONFIDENT = ("--mechanism", "confident", "--sigma", "40", "--threshold", "200", "--sigma-threshold", "150")


@pytest.fixture
def votes(tmp_path: Path) -> Path:
    path = tmp_path / "counts.npy"
    np.save(path, np.array([[250, 0, 0], [10, 230, 10], [125, 0, 125]] * 20))
    return path


def output(path: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["pate", "--votes", str(path), *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def call(path: Path, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output(path, *arguments, "--json"))
    return found


def refusal(path: Path, *arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(app, ["pate", "--votes", str(path), *arguments], catch_exceptions=False)
    return str(caught.value)


@pytest.mark.parametrize("mechanism", [LNMAX, GNMAX, CONFIDENT], ids=lambda arguments: arguments[1])
def test_both_epsilons_per_query_and_total(votes: Path, mechanism: tuple[str, ...]) -> None:
    found = call(votes, *mechanism, "--delta", "1e-5")
    assert (found["queries"], found["teachers"], found["classes"], found["unit"]) == (60, 250, 3, "record")
    assert 0 < found["epsilon_data_dependent"] < found["epsilon_data_independent"] <= found["epsilon_rdp"] * (1 + 1e-12)
    assert found["epsilon_data_dependent_is"] == PRIVATE
    each = found["per_query"]
    for kind in ("dependent", "independent"):
        assert len(each[f"epsilon_data_{kind}"]) == 60
        assert each[f"total_so_far_data_{kind}"][-1] == found[f"epsilon_data_{kind}"]
        assert max(each[f"epsilon_data_{kind}"]) < found[f"epsilon_data_{kind}"]
    published = found["as_published"]
    assert found["epsilon_data_dependent"] < published["epsilon_data_dependent"]
    assert found["epsilon_data_independent"] < published["epsilon_data_independent"]
    assert found["orders"] >= 100


def test_published_bounds_are_those_of_the_2017_paper(votes: Path) -> None:
    # 60 queries at gamma 0.05: moments 2 gamma^2 l (l + 1), best at l = 6 of 1 to 8.
    found = call(votes, *LNMAX)["as_published"]["epsilon_data_independent"]
    assert found == pytest.approx(min((60 * 0.005 * n * (n + 1) + np.log(1e5)) / n for n in range(1, 9)))


def test_confident_says_that_its_answers_are_expected_and_what_holds_for_any(votes: Path) -> None:
    found = call(votes, *CONFIDENT)
    assert found["answers_are"] == "expected"
    assert 0 < found["answers"] < 60
    assert found["epsilon_rdp"] > found["epsilon_data_independent"]
    assert found["epsilon"] == found["epsilon_pld"] < found["epsilon_rdp"]
    assert "(expected)" in output(votes, *CONFIDENT)
    assert "PRIVATE, too: the expected number of answers" in output(votes, *CONFIDENT)
    assert "PRIVATE, too" not in output(votes, *GNMAX)
    assert call(votes, *GNMAX)["answers_are"] == "all"


def test_words_say_what_is_private(votes: Path) -> None:
    text = output(votes, *LNMAX)
    assert "PRIVATE" in text
    assert "data-independent" in text
    assert "scale 20 votes" in text


def test_how_many_queries_fit_a_budget(votes: Path) -> None:
    found = call(votes, *GNMAX, "--epsilon", "0.8")
    totals = np.array(found["per_query"]["total_so_far_data_independent"])
    assert 0 < found["queries_that_fit"] < found["queries_that_fit_data_dependent"] <= 60
    assert totals[found["queries_that_fit"] - 1] <= 0.8 < totals[found["queries_that_fit"]]
    assert "queries that fit" in output(votes, *GNMAX, "--epsilon", "0.8")


def test_a_release_is_fresh_each_time_and_above_the_private_value(votes: Path) -> None:
    found = [call(votes, *GNMAX, "--release") for _ in range(2)]
    assert found[0]["release"]["epsilon"] != found[1]["release"]["epsilon"]
    assert all(each["release"]["epsilon"] > each["epsilon_data_dependent"] for each in found)
    assert call(votes, *GNMAX)["release"] is None
    assert "may be published" in output(votes, *GNMAX, "--release")
    assert "which queries were answered" in refusal(votes, *CONFIDENT, "--release")


def test_a_plot_is_drawn(votes: Path, tmp_path: Path) -> None:
    for mechanism in (LNMAX, CONFIDENT):
        output(votes, *mechanism, "--plot", str(tmp_path / "epsilon.png"))
        assert (tmp_path / "epsilon.png").read_bytes().startswith(b"\x89PNG")
    assert "cannot write the plot" in refusal(votes, *GNMAX, "--plot", str(tmp_path / "none" / "epsilon.png"))


def test_a_large_delta_is_warned_of(votes: Path) -> None:
    assert call(votes, *GNMAX)["warnings"] == []
    assert "publishing all data of one unit" in call(votes, *GNMAX, "--delta", "0.01")["warnings"][0]


def test_twenty_thousand_queries_take_seconds(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    np.save(tmp_path / "many.npy", generator.multinomial(250, [0.7, *[0.3 / 9] * 9], size=20_000))
    start = time.process_time()
    found = call(tmp_path / "many.npy", *LNMAX)
    assert time.process_time() - start < 20
    assert found["queries"] == 20_000
    assert found["epsilon_data_dependent"] <= found["epsilon_data_independent"] <= 10_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--mechanism", "lnmax"), "--gamma is missing"),
        (("--mechanism", "gnmax", "--gamma", "1"), "--gamma is not allowed"),
        ((*LNMAX, "--sigma", "3"), "--sigma is not allowed"),
        (("--mechanism", "confident", "--sigma", "40"), "--threshold is missing"),
        (("--mechanism", "gnmax", "--sigma", "0"), "--sigma 0.0 gives no guarantee"),
        (("--mechanism", "lnmax", "--gamma", "nan"), "--gamma nan gives no guarantee"),
        ((*GNMAX, "--delta", "0"), "delta 0.0 is not in"),
        ((*GNMAX, "--epsilon", "-1"), "target epsilon -1.0"),
    ],
)
def test_senseless_parameters_are_refused(votes: Path, arguments: tuple[str, ...], said: str) -> None:
    assert said in refusal(votes, *arguments)


def test_files_that_hold_no_votes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "counts.npy"
    assert "no such file" in refusal(path, *GNMAX)
    for content in (
        b"", b"1,2\n3,4\n", b"\x93NUMPY\x01\x00\x10\x00garbage", b"\x93NUMPY\x01\x00\x0c\x00{'descr': (}",
        b"\x93NUMPY\x01\x00\x0c\x00{'descr': \x00}", b'\x93NUMPY\x01\x00\x04\x00"""\n',
    ):  # fmt: skip
        path.write_bytes(content)
        assert "no .npy file of numbers" in refusal(path, *GNMAX)
    np.save(path, np.array([[3, 0], None], dtype=object), allow_pickle=True)
    assert "no .npy file of numbers" in refusal(path, *GNMAX)
    np.savez(tmp_path / "counts.npz", np.eye(3, dtype=int))
    assert "no .npy file of numbers" in refusal(tmp_path / "counts.npz", *GNMAX)
    assert "no .npy file of numbers" in refusal(tmp_path, *GNMAX)
    for wrong, said in (
        (np.array([[1, -1]]), "row 0 of the votes is [1, -1]"),
        (np.array([[1.0, 2.0]]), "float64"),
        (np.array([[1.0, np.nan]]), "NaN"),
        (np.array([[1, 2], [2, 2]]), "adds up to 3 and row 1 to 4"),
    ):
        np.save(path, wrong)
        assert said in refusal(path, *GNMAX)
        assert str(path) in refusal(path, *GNMAX)


def test_the_guarantee_of_lnmax_is_exact_by_pld(votes: Path, load_benchmark: Callable[[str], ModuleType]) -> None:
    exact, found = load_benchmark("loss_integral"), call(votes, *LNMAX)
    assert found["epsilon"] == found["epsilon_pld"] < 0.95 * found["epsilon_rdp"]
    assert found["accountant"] == "pld"
    losses = exact.laplace(0.05)
    for share, holds in ((1.0, True), (0.995, False)):
        assert (exact.larger_delta(losses, 120, found["epsilon"] * share) <= 1e-5) is holds
    assert "the smaller of two sound bounds" in output(votes, *LNMAX)


def test_how_many_queries_of_confident_fit_is_the_same_for_any_votes(votes: Path, tmp_path: Path) -> None:
    clear = np.zeros_like(np.load(votes))
    clear[:, 0] = np.load(votes)[0].sum()
    np.save(tmp_path / "clear.npy", clear)
    found = [call(path, *CONFIDENT, "--epsilon", "0.3") for path in (votes, tmp_path / "clear.npy")]
    assert found[0]["queries_that_fit"] == found[1]["queries_that_fit"]
    assert 0 < found[0]["queries_that_fit_data_dependent"] < found[1]["queries_that_fit_data_dependent"]
    assert found[0]["epsilon"] == found[1]["epsilon"]
    assert found[0]["epsilon_data_independent"] != found[1]["epsilon_data_independent"]

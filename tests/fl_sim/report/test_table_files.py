"""The files of a table: LaTeX is whole and compiles, and tidy CSV has its units in the names."""

import csv
import io
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from fl_sim.report.captions import notes
from fl_sim.report.measures import flat_settings, measures, of_round
from fl_sim.report.table import DIFFERENCES, HIGHEST, SeedResult, Table
from fl_sim.report.table_files import as_json, csv_text, latex, latex_further, markdown, rounds_text
from fl_sim.store.run_directory import RoundRecord

AWKWARD = r"100 % of $x_1 & #2 {a} ~ ^ \ [b] <c> |d| ±"


NOTE = (
    r"Note: 100 \% of \$x\_1 \& \#2 \{a\} \textasciitilde{} \textasciicircum{} \textbackslash{} {[}b{]} "
    r"\textless{}c\textgreater{} \textbar{}d\textbar{} $\pm$.\par"
)


def table(columns: int = 1) -> Table:
    names = tuple(f"Dir(0.{number}) & [more]" for number in range(columns))
    results = tuple(
        SeedResult(row, column, seed, "finished", "d", last + seed / 100, last + seed / 100)
        for row, last in (("[A] (mu_1=5%)", 0.9), ("B", 0.8), ("Centralized", 0.95))
        for column in names
        for seed in range(3)
    )
    rows = ("[A] (mu_1=5%)", "B", "Centralized")
    return Table(rows, names, frozenset({"Centralized"}), results, ("What is shown.", f"Note: {AWKWARD}."))


def test_it_is_one_environment_with_caption_label_accuracies_and_notes() -> None:
    assert latex(table(), "label_skew hard").splitlines() == [
        r"% \usepackage{booktabs,graphicx}",
        r"\begin{table}[tbp]",
        r"\centering",
        r"\caption{What is shown.}",
        r"\label{tab:label-skew-hard}",
        r"\small",
        r"\setbox0=\hbox{%",
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"& \multicolumn{2}{c}{Dir(0.0) \& {[}more{]}} \\",
        r"\cmidrule(lr){2-3}",
        r"Method & last & best \\",
        r"\midrule",
        r"{[}A{]} (mu\_1=5\%) & \textbf{91.0 $\pm$ 1.0} & \textbf{91.0 $\pm$ 1.0} \\",
        r"B & 81.0 $\pm$ 1.0 & 81.0 $\pm$ 1.0 \\",
        r"\midrule",
        r"Centralized & 96.0 $\pm$ 1.0 & 96.0 $\pm$ 1.0 \\",
        r"\bottomrule",
        r"\end{tabular}}",
        r"\leavevmode\ifdim\wd0>\linewidth\resizebox{\linewidth}{!}{\box0}\else\box0\fi\par\medskip",
        r"\begin{minipage}{\linewidth}\footnotesize",
        NOTE,
        rf"{notes(table())[2].replace('%', chr(92) + '%')}\par",
        r"No privacy guarantee: all methods.\par",
        r"\end{minipage}",
        r"\end{table}",
    ]


def test_further_tables_are_environments_of_their_own() -> None:
    assert latex_further(table(), "label_skew hard").splitlines() == [
        r"% \usepackage{booktabs,graphicx}",
        "",
        r"\begin{table}[tbp]",
        r"\centering",
        rf"\caption{{{DIFFERENCES.format(HIGHEST).replace('%', chr(92) + '%')}.}}",
        r"\label{tab:label-skew-hard-1}",
        r"\small",
        r"\setbox0=\hbox{%",
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"Method & Dir(0.0) \& {[}more{]} \\",
        r"\midrule",
        r"{[}A{]} (mu\_1=5\%) & highest mean \\",
        r"B & $-$10.0 {[}$-$10.0, $-$10.0{]} \\",
        r"\bottomrule",
        r"\end{tabular}}",
        r"\leavevmode\ifdim\wd0>\linewidth\resizebox{\linewidth}{!}{\box0}\else\box0\fi\par\medskip",
        r"\end{table}",
    ]
    assert latex_further(replace(table(), results=()), "t") == ""


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ("FedProx (mu=0.01)", r"FedProx ($\mu=0.01$)"),
        ("X (epsilon = 10, delta=1e-05)", r"X ($\varepsilon=10$, $\delta=10^{-5}$)"),
        ("Y (lambda=2.5e-3, gamma=half, mu_1=2)", r"Y ($\lambda=2.5\times 10^{-3}$, gamma=half, mu\_1=2)"),
        ("Z (server.eta=1)", "Z (server.eta=1)"),
    ],
)
def test_parameters_with_greek_names_are_formulas(row: str, shown: str) -> None:
    one = SeedResult(row, "x", 0, "finished", "d", 0.5, 0.5)
    assert f"\n{shown} & 50.0" in latex(Table((row,), ("x",), frozenset(), (one,), ("A.",)), "t")


@pytest.mark.parametrize("columns", [1, 3, 7])
def test_every_environment_and_brace_is_closed_and_every_line_has_all_columns(columns: int) -> None:
    text = latex(table(columns), "t")
    opened = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        assert kind == "begin" or opened.pop() == name
        opened += [name] if kind == "begin" else []
    assert not opened
    bare = re.sub(r"\\[{}]", "", text)
    assert bare.count("{") == bare.count("}")
    rows = [line for line in text.splitlines() if re.match(r"(B|Centralized) &", line)]
    assert [line.replace(r"\&", "").count("&") for line in rows] == [2 * columns, 2 * columns]


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_pdflatex_compiles_it(tmp_path: Path) -> None:
    wide, narrow, more = latex(table(7), "wide"), latex(table(), "narrow"), latex_further(table(), "more")
    document = rf"\documentclass{{article}}\usepackage{{booktabs,graphicx}}\begin{{document}}{wide}{narrow}{more}"
    (tmp_path / "paper.tex").write_text(document + r"Tables \ref{tab:wide}, \ref{tab:narrow}.\end{document}")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert made.returncode == 0, made.stdout
    assert "Overfull" not in made.stdout, made.stdout
    assert (tmp_path / "paper.pdf").stat().st_size > 10_000


def test_a_line_break_in_a_title_breaks_no_line_of_any_file() -> None:
    plain = table()
    rows = (r"[A] (mu_1=5%)", "B", "Centralized")
    broken = replace(
        plain,
        rows=("A\n\n\\end{table}|x", *rows[1:]),
        columns=("Dir\n| forged | 99 |",),
        results=tuple(
            replace(one, row=one.row if one.row in rows[1:] else "A\n\n\\end{table}|x", column="Dir\n| forged | 99 |")
            for one in plain.results
        ),
        caption=("What is\nshown.", "Note:\n# a heading"),
    )
    assert len(latex(broken, "x").splitlines()) == len(latex(plain, "x").splitlines())
    assert len(markdown(broken).splitlines()) == len(markdown(plain).splitlines())
    assert not any(line.startswith(("# a", "| forged")) for line in markdown(broken).splitlines())
    pipes = {len(re.findall(r"(?<!\\)\|", line)) for line in markdown(broken).splitlines()[:5]}
    assert len(pipes) == 1


RESULT = {
    "status": "finished", "final_accuracy": 0.5, "best_accuracy": 0.75, "seed": 3, "clients": 10, "rounds": 2,
    "is_private": False, "privacy": [
        {"unit": "record", "epsilon": 2.0, "delta": 1e-5, "epsilon_whole_run": 2.5, "delta_whole_run": 2e-5},
        {"unit": "client", "epsilon": None},
        {"unit": "record", "epsilon": 1.0, "delta": 0.0, "epsilon_whole_run": 2.5, "delta_whole_run": 2e-5},
    ],
    "preprocess": {"kind": "da-fl", "clients": [{"counts": [1]}]}, "seconds": {"train": 1.5, "total": 2.0},
    "measures": {"macro_f1": 0.25, "bytes_up": 1000, "recall": [0.5, 1.0], "per_client": {"accuracy": 0.125}},
}  # fmt: skip


SETTINGS = {"data": "digits", "partition": {"kind": "label-k", "k": 1}, "seed": 3, "rounds": 2, "gammas": [0.1, 0.2]}


def finished(column: str = "x") -> SeedResult:
    place = ("A", column, 3, "finished", "cells/a")
    return SeedResult(*place, 0.5, 0.75, settings=flat_settings(SETTINGS), measures=measures(RESULT))


def tidy_table(*results: SeedResult) -> Table:
    rows, columns = (tuple(dict.fromkeys(getattr(one, name) for one in results)) for name in ("row", "column"))
    return Table(rows, columns, frozenset(), results)


def test_every_number_of_a_result_has_a_dotted_name_and_a_share_is_in_percent_by_its_name() -> None:
    assert measures(RESULT) == {
        "rounds_done": 2, "final_accuracy_percent": 50.0, "best_accuracy_percent": 75.0, "seconds.train": 1.5,
        "seconds.total": 2.0, "macro_f1_percent": 25.0, "bytes_up": 1000, "per_client.accuracy_percent": 12.5,
        "epsilon.record": 2.5, "delta.record": 2e-5, "epsilon.record.1": 2.0, "delta.record.1": 1e-5,
        "epsilon.record.2": 1.0, "delta.record.2": 0.0,
    }  # fmt: skip


def test_where_nobody_says_what_several_releases_cost_a_record_together_none_of_them_is_told_as_that() -> None:
    earlier = {"privacy": [{"unit": "record", "epsilon": epsilon, "delta": 1e-5} for epsilon in (1.0, 2.0)]}
    assert measures(earlier) == {
        "epsilon.record.1": 1.0, "delta.record.1": 1e-5, "epsilon.record.2": 2.0, "delta.record.2": 1e-5,
    }  # fmt: skip
    assert measures({"privacy": earlier["privacy"][:1]}) == {"epsilon.record": 1.0, "delta.record": 1e-5}


def test_a_centralized_run_of_an_earlier_version_tells_nothing_of_clients() -> None:
    beside = {"client_accuracy": 0.5, "client_worst_tenth": 0.5, "macro_f1": 0.25}
    found = measures({"partition": "centralized", "final_accuracy": 0.5, "measures": beside})
    assert found == {"final_accuracy_percent": 50.0, "macro_f1_percent": 25.0}
    assert "client_worst_tenth_percent" in measures({"partition": "label-2", "measures": beside})


def test_a_line_a_run_with_a_column_for_every_setting_and_measure() -> None:
    failed = SeedResult("B", "x", 3, "failed", "cells/b", error="it diverged", settings={"data": "mnist"})
    lines = list(csv.DictReader(io.StringIO(csv_text(tidy_table(finished(), failed)))))
    first, second = lines
    assert list(first)[:8] == ["row", "column", "seed", "status", "data", "partition.kind", "partition.k", "rounds"]
    assert (first["partition.kind"], first["partition.k"], first["gammas"]) == ("label-k", "1", "[0.1, 0.2]")
    assert (first["final_accuracy_percent"], first["bytes_up"], first["epsilon.record"]) == ("50.0", "1000", "2.5")
    assert (second["status"], second["error"], second["data"]) == ("failed", "it diverged", "mnist")
    assert second["final_accuracy_percent"] == ""


def test_csv_and_json_have_the_same_numbers_under_the_same_names() -> None:
    (line,) = csv.DictReader(io.StringIO(csv_text(tidy_table(finished()))))
    (cell,) = as_json(tidy_table(finished()))["cells"]
    assert cell["values"] == [float(line["final_accuracy_percent"])]
    assert cell["best_values"] == [float(line["best_accuracy_percent"])]
    for name, (value,) in cell["measures"].items():
        assert float(line[name]) == value
    assert {name for name in line if name.startswith("seconds")} == {"seconds.train", "seconds.total"}
    assert json.loads(json.dumps(cell)) == cell


def test_a_run_in_several_columns_is_one_line() -> None:
    (line,) = csv.DictReader(io.StringIO(csv_text(tidy_table(finished(), finished("y")))))
    assert line["column"] == "x; y"


def test_rounds_have_a_line_each_and_what_is_not_measured_is_empty() -> None:
    record = RoundRecord(1, 0.5, 1.25, None, None, 10, 0.1, 0.5)
    rounds = {"cells/a": [record, replace(record, round=2, test_accuracy=None, test_loss=None, train_loss=0.75)]}
    first, second = csv.DictReader(io.StringIO(rounds_text(tidy_table(finished()), rounds)))
    assert (first["row"], first["column"], first["seed"], first["round"], first["dir"]) == (
        "A",
        "x",
        "3",
        "1",
        "cells/a",
    )
    assert (first["test_accuracy_percent"], first["test_loss"], first["train_loss"]) == ("50.0", "1.25", "")
    assert (second["round"], second["test_accuracy_percent"], second["train_loss"]) == ("2", "", "0.75")
    assert of_round(record)["test_accuracy_percent"] == 50.0


def test_texts_of_users_are_no_formulas_and_numbers_stay_numbers() -> None:
    settings = {**flat_settings(SETTINGS), "=name": "@x", "low": -0.5}
    one = SeedResult("=HYPERLINK(1)", "+x", 3, "failed", "-dir", None, None, error="@error", settings=settings)
    head, line = csv.reader(io.StringIO(csv_text(tidy_table(one))))
    cells = dict(zip(head, line, strict=True))
    assert (cells["row"], cells["column"], cells["dir"], cells["error"]) == (
        "'=HYPERLINK(1)",
        "'+x",
        "'-dir",
        "'@error",
    )
    assert (cells["'=name"], cells["low"]) == ("'@x", "-0.5")
    record = RoundRecord(1, None, None, None, cohort=None, epsilon=None, learning_rate=0.1, seconds=None)
    head, line = csv.reader(io.StringIO(rounds_text(tidy_table(one), {"-dir": [record]})))
    assert dict(zip(head, line, strict=True))["row"] == "'=HYPERLINK(1)"

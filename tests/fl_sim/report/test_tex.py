"""A LaTeX table is whole, and LaTeX takes it."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from fl_sim.report.table import DIFFERENCES, SeedResult, Table, notes
from fl_sim.report.table_markdown import markdown
from fl_sim.report.tex import latex

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


def test_it_is_one_environment_with_caption_label_and_both_tabulars() -> None:
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
        f"{DIFFERENCES.replace('%', chr(92) + '%')}:" + r"\par\smallskip",
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
        r"\begin{minipage}{\linewidth}\footnotesize",
        NOTE,
        rf"{notes(table())[2].replace('%', chr(92) + '%')}\par",
        r"No privacy guarantee: any method here.\par",
        r"\end{minipage}",
        r"\end{table}",
    ]


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
    assert [line.replace(r"\&", "").count("&") for line in rows] == [2 * columns, 2 * columns, columns]


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_pdflatex_compiles_it(tmp_path: Path) -> None:
    wide, narrow = latex(table(7), "wide"), latex(table(), "narrow")
    document = rf"\documentclass{{article}}\usepackage{{booktabs,graphicx}}\begin{{document}}{wide}{narrow}"
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

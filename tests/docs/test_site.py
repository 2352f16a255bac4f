"""The documentation is built without a warning, quickly enough, and needs no network to be read."""

import html
import inspect
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from clients.train import Train
from fl_sim.experiment.experiment import experiment_from, with_overrides
from fl_sim.report.gallery import page_of, read_gallery
from fl_sim.simulation.rounds import Rounds
from strategies.flower import run_round

PROJECT = Path(__file__).parents[2]
PARTS = ("docs", "examples", "benchmarks", "fl_sim", "strategies", "clients", "partitions")
"""What the site is made of."""


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 10
    loaded = {
        found
        for page in pages
        for found in re.findall(r"<(?:script|link|img|iframe)[^>]*https?://[^>]*>", page.read_text())
    }
    assert {found for found in loaded if 'rel="canonical"' not in found} == set()


def test_what_a_page_of_the_repository_links_to_is_a_page_of_the_site(site: Path) -> None:
    assert "Clients minimise F_i(w)" in (site / "source/examples/feddyn.py.html").read_text()
    assert "source/examples/feddyn.py.html" in (site / "adding/algorithm.html").read_text()


def test_a_link_that_leads_nowhere_is_an_error(
    build_site: Callable[[Path, Path], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    links = ["nowhere.md", "tables.md#nowhere", "../examples/nowhere.py", "/tables.md"]
    for part in PARTS:
        if part != "docs":
            (tmp_path / part).symlink_to(PROJECT / part)
    shutil.copytree(PROJECT / "docs/site", tmp_path / "docs/site")
    (tmp_path / "docs/tables.md").write_text("# Tables\n")
    (tmp_path / "docs/index.md").write_text("# A page\n\n" + " ".join(f"[a link]({link})" for link in links))
    settings = tmp_path / "docs/site/mkdocs.yml"
    settings.write_text(settings.read_text().partition("\nnav:")[0])
    done = build_site(tmp_path, tmp_path / "out")
    assert done.returncode == 1
    assert [link for link in links if link not in done.stderr] == []


def test_figures_among_the_answers_are_those_of_the_pages_that_they_come_from() -> None:
    answers = (PROJECT / "docs/faq.md").read_text()
    table = answers.partition("| published | here | why |")[2].partition("\n\n")[0]
    figures = set(re.findall(r"\d+\.\d+", table)) - {"0.05"}
    texts = [(PROJECT / "docs/tutorials/pate.md").read_text()]
    texts += [page_of(entry, "../..") for entry in read_gallery(PROJECT / "docs/results")]
    known = {
        f"{float(number):.{places}f}" for text in texts for number in re.findall(r"\d+\.\d+", text) for places in (1, 2)
    }
    assert len(figures) > 15
    assert figures - known == set()


def test_no_page_of_the_program_is_stale(site: Path) -> None:
    settings, commands = (site / "settings.html").read_text(), (site / "commands.html").read_text()
    assert "algorithm.student.augmentation, with algorithm.student=fixmatch" in settings
    assert "local.precision" in settings
    assert "fl-sim privacy global-dp" in commands
    assert "set a smaller algorithm.server_learning_rate" in (site / "faq.html").read_text()


def test_every_kind_has_a_page_with_a_command_that_is_valid(site: Path) -> None:
    index = (site / "kinds.html").read_text()
    pages = sorted((site / "kinds").glob("*.html"))
    assert len(pages) > 60
    for page in pages:
        assert f'href="kinds/{page.name}"' in index
        text = re.sub(r"<[^>]+>", "", page.read_text())
        [command] = re.findall(r"^fl-sim run (.+)$", text, re.MULTILINE)
        settings = [one for one in html.unescape(command).split() if one != "devices.path=devices.csv"]
        if "devices=profile" not in settings:  # which needs a file
            experiment_from(with_overrides({}, settings))


def test_a_methods_page_has_its_paper_parameters_deviations_and_accuracies(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "kinds/algorithm-fedvls.html").read_text())
    for wanted in ("Guo et al. 2025", "algorithm.logit_weight", "0.005", "That term has no lower bound", "84.2 ± 5.5"):
        assert wanted in text


def test_the_tables_of_methods_have_the_parameters_of_the_classes(site: Path) -> None:
    table = (site / "methods.html").read_text()
    for kind, wanted in (("algorithm-moon", "mu 5.0, tau 0.5"), ("attack-min-max", "knows all, direction deviation")):
        [row] = [one for one in table.split("</tr>") if f'href="kinds/{kind}.html"' in one]
        assert wanted in re.sub(r"<[^>]+>", "", row)


def test_pages_show_the_code_of_the_examples(site: Path) -> None:
    pages = [page.read_text() for page in (site / "adding").glob("*.html")]
    texts = [html.unescape(re.sub(r"<[^>]+>", "", page)) for page in pages]
    for quoted in ("@dataclass(frozen=True)\nclass OneBigClient", 'title: ClassVar[str] = "FedDyn"', "def rings("):
        assert any(quoted in text for text in texts)
    assert not any("<!-- code" in page for page in pages)


def test_the_loop_is_quoted_from_its_source(site: Path) -> None:
    text = html.unescape(re.sub(r"<[^>]+>", "", (site / "how-it-works.html").read_text()))
    for quoted in (Rounds.run, run_round, Train.run):
        assert inspect.getsource(quoted).strip().splitlines()[-1].strip() in text
    assert "code: " not in text

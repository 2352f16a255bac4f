"""A report's page of hand-made runs, opened from its file in a real Chromium."""

import json
import math
import shutil

import pytest
import tomli_w

from fl_sim.cli.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip

METHODS = {"fedavg": "FedAvg", "fedprox": "FedProx", "scaffold": "SCAFFOLD", "centralized": "Centralized"}
CONFUSION = [[8, 2, 0], [1, 9, 0], [0, 3, 7]]
RELEASE = {"unit": "client", "epsilon": 3.21, "delta": 1e-5, "covers": "the models", "ledger": "0123456789abcdef"}


def write_run(folder, kind, split, seed, rounds=12, *, private=False):
    """Write a finished run whose accuracies follow from its arguments."""
    path = folder / f"{kind}-{split}-{seed}{'-private' if private else ''}"
    path.mkdir(parents=True)
    settings = {
        "data": "digits", "seed": seed, "clients": 10, "rounds": rounds, "model": "mlp",
        "algorithm": {"kind": kind, **({"mu": 0.5} if kind == "fedprox" else {})},
        "partition": {"kind": "label-k", "k": split},
        "aggregator": {"kind": "global-dp" if private else "mean"},
    }  # fmt: skip
    height = 50 + 2 * len(kind) + 3 * split + seed
    accuracies = [height * (1 - math.exp(-number / 4)) / 100 for number in range(1, rounds + 1)]
    lines = [
        {"round": number, "test_accuracy": accuracy, "test_loss": 2.5 - 2 * accuracy, "train_loss": None,
         "epsilon": 0.25 * number if private else None, "cohort": None if private else 10, "learning_rate": 0.1,
         "seconds": None if private else 0.5, **({} if private else {"bytes_down": 10**6, "bytes_up": 10**6})}
        for number, accuracy in enumerate(accuracies, 1)
    ]  # fmt: skip
    told = {"client_accuracy": 0.6, "client_worst_tenth": 0.2, "client_quantiles": [0.1 * step for step in range(11)]}
    result = {
        "status": "finished", "data_note": "", "is_private": private, "engine": "inprocess", "rounds": rounds,
        "partition": "centralized" if kind == "centralized" else f"label-{split}",
        "titles": {"algorithm": METHODS.get(kind, kind)}, "final_accuracy": accuracies[-1],
        "best_accuracy": max(accuracies), "privacy": [RELEASE] if private else [],
        "measures": {"confusion": CONFUSION, **({} if private else told)},
        "seconds": {"preprocess": 1, "train": 6, "total": 8}, "versions": {"torch": "9.9"},
    }  # fmt: skip
    (path / "config.toml").write_text(tomli_w.dumps(settings))
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "result.json").write_text(json.dumps(result))


@pytest.fixture(scope="session", name="write_run")
def write_run_fixture():
    return write_run


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Return the page of four methods on two splits, one of them private on one of these."""
    folder = tmp_path_factory.mktemp("runs")
    for split in (1, 2):
        for kind in METHODS:
            for seed in (0, 1) if kind != "centralized" or split == 1 else ():
                write_run(folder / "runs", kind, split, seed)
    write_run(folder / "runs", "fedavg", 1, 0, private=True)
    write_report([folder / "runs"], folder / "report", paper=False, pictures=False, target=None, json_output=True)
    return folder / "report" / "report.html"


@pytest.fixture(scope="module")
def chromium():
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install 'fl-sim[dev]'"
    )
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium):
    """Open a file; whatever the console says, or a second file that is asked for, fails the test."""
    said, contexts = [], []

    def open_page(path, *, width=1100, scheme="light", **options):
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on(
            "request",
            lambda request: said.append(request.url) if not request.url.startswith(("file:", "data:")) else None,
        )
        page.goto(f"file://{path}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []


@pytest.fixture
def plot():
    """Return the figure of a page with this number, once it is drawn."""

    def drawn(page, number=0):
        page.locator(".plot").nth(number).scroll_into_view_if_needed()
        page.wait_for_selector(".plot svg .curve")
        return page.locator(".plot").nth(number)

    return drawn

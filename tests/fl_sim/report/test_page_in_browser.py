"""The page in a real Chromium, from a file: what is clicked, typed and read there, in light, in dark and on a phone."""

import itertools
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

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
]

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


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Return the page of four methods on two splits, one of them private on one of these."""
    folder = tmp_path_factory.mktemp("runs")
    for split in (1, 2):
        for kind in METHODS:
            for seed in (0, 1) if kind != "centralized" or split == 1 else ():
                write_run(folder / "runs", kind, split, seed)
    write_run(folder / "runs", "fedavg", 1, 0, private=True)
    write_report([folder / "runs"], folder / "report", paper=False, target=None, json_output=True)
    return folder / "report" / "report.html"


@pytest.fixture(scope="module")
def chromium():
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


def plot(page, number=0):
    page.locator(".plot").nth(number).scroll_into_view_if_needed()
    page.wait_for_selector(".plot svg .curve")
    return page.locator(".plot").nth(number)


def names_in(page, plot_number=0):
    return page.locator(".plot").nth(plot_number).locator(".curve").count()


def test_the_pointer_and_the_arrow_keys_show_every_method_s_value_in_a_round(report, opened):
    page = opened(report)
    first = plot(page)
    box = first.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 14, box["y"] + 100)
    tip = first.locator(".tip")
    told = tip.inner_text()
    assert told.startswith("round 12")
    assert "FedAvg\t62.2 ± 0.7" in told  # the mean of 61.76 and 62.71, FedAvg's accuracies after 12 rounds on label-1
    values = [float(line.split("\t")[2].split()[0]) for line in told.splitlines()[1:] if "\t" in line]
    assert len(values) == 5
    assert values == sorted(values, reverse=True)
    first.focus()
    page.keyboard.press("Home")
    assert tip.inner_text().startswith("round 1\n")
    page.keyboard.press("ArrowRight")
    assert tip.inner_text().startswith("round 2\n")
    page.keyboard.press("Escape")
    assert tip.is_hidden()


def test_a_finger_shows_the_values_where_it_was(report, opened):
    page = opened(report, width=375, is_mobile=True, has_touch=True)
    first = plot(page)
    first.tap()
    assert first.locator(".tip").inner_text().startswith("round 6\n")
    box = first.locator(".tip").bounding_box()
    assert 0 <= box["x"] <= box["x"] + box["width"] <= 375


def test_a_click_on_the_legend_hides_a_method_in_all_figures_and_shows_it_again(report, opened):
    page = opened(report)
    plot(page)
    before = names_in(page)
    button = page.locator(".legend button", has_text="SCAFFOLD")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert names_in(page) == before - 1
    assert "SCAFFOLD" not in page.locator(".rows").first.inner_text()
    button.focus()
    page.keyboard.press("Enter")
    assert names_in(page) == before
    page.locator(".legend button", has_text="hide all").click()
    assert names_in(page) == 0
    assert "all methods are hidden" in page.locator(".plot").first.text_content()


def test_the_axes_are_switched_to_a_log_scale_bytes_seconds_and_epsilon(report, opened):
    page = opened(report)
    first = plot(page)
    linear = first.locator(".curve").first.get_attribute("points")
    page.get_by_label("log scale").check()
    assert first.locator(".curve").first.get_attribute("points") != linear
    page.get_by_label("log scale").uncheck()
    page.get_by_label("over").select_option("mb")
    assert "MB to and from all clients" in first.text_content()
    first.focus()
    page.keyboard.press("End")
    assert first.locator(".tip").inner_text().startswith("MB to and from all clients: 24\n")
    assert "aggregator=global-dp" not in first.locator(".tip").inner_text()  # it may not tell who took part
    page.keyboard.press("Home")
    assert first.locator(".tip").inner_text().startswith("MB to and from all clients: 2\n")
    page.get_by_label("over").select_option("seconds")
    first.focus()
    page.keyboard.press("End")
    assert first.locator(".tip").inner_text().startswith("seconds: 7\n")  # one before the first round
    page.get_by_label("over").select_option("epsilon")
    assert names_in(page) == 1  # the private run alone
    page.get_by_label("Show").select_option("loss")
    assert page.locator(".plot").nth(1).text_content().endswith("not known for any of the methods shown")


def test_every_measure_is_drawn_over_every_axis_on_either_scale(report, opened):
    page = opened(report)  # which fails for whatever the console says
    plot(page)
    for log in (True, False):
        page.get_by_label("log scale").set_checked(log)
        for measure in ("accuracy", "loss"):
            page.get_by_label("Show").select_option(measure)
            for axis in ("round", "mb", "seconds", "epsilon"):
                page.get_by_label("over").select_option(axis)
                page.locator(".plot").nth(1).scroll_into_view_if_needed()
                assert "NaN" not in page.locator(".panels").first.inner_html()


def test_tables_are_sorted_by_a_click_or_the_keyboard_and_the_upper_bound_stays_below(report, opened):
    page = opened(report)
    table = page.locator("main table").first
    head = table.locator("thead th", has_text="Final %")
    place = [one.strip() for one in table.locator("thead th").all_inner_texts()].index("Final %")

    def column():
        cells = table.locator(f"tbody tr:not(.bound) td:nth-child({place + 1})").all_inner_texts()
        return [float(cell.split()[0]) for cell in cells]

    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert column() == sorted(column(), reverse=True)
    head.locator("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert column() == sorted(column())
    assert "bound" in table.locator("tbody tr").last.get_attribute("class")
    assert table.locator("th[aria-sort]").count() == 1


def test_what_all_rows_share_is_said_once(report, opened):
    page = opened(report)
    table = page.locator("main table").first
    assert "Model" not in table.locator("thead").inner_text()
    assert (
        page.locator(".common").first.inner_text()
        == "In all rows: data digits; clients 10 (but for the upper bound); model mlp; status finished."
    )


def test_targets_clients_and_confusion_are_drawn(report, opened):
    page = opened(report)
    page.get_by_label("To a test accuracy of").select_option(label="50 %")
    section = page.locator("section", has=page.get_by_role("heading", name="What a target took"))
    section.scroll_into_view_if_needed()
    section.locator(".rows").first.wait_for()
    fedavg = section.locator(".rows").first.locator("[title^=FedAvg] + .track + .value").all_inner_texts()
    assert "6 ± 0" in fedavg  # of 65 and 66 times 1 - exp(-round / 4)
    clients = page.locator("section", has=page.get_by_role("heading", name="Accuracy over clients"))
    clients.scroll_into_view_if_needed()
    assert "global-dp" not in clients.inner_text()
    page.get_by_role("heading", name="Confusion matrices").scroll_into_view_if_needed()
    matrix = page.locator("table.confusion")
    page.wait_for_selector("table.confusion")
    assert matrix.locator("tbody tr").nth(0).locator("td").all_inner_texts() == ["16", "4", ""]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_contrast_and_the_switch_turns_the_colours(report, opened, scheme):
    page = opened(report, scheme=scheme)
    background = "getComputedStyle(document.body).backgroundColor"
    first = page.evaluate(background)
    see_all(page)
    assert page.evaluate(CONTRAST) == []
    page.locator("#theme").click()
    assert page.evaluate(background) != first
    assert page.evaluate(CONTRAST) == []


def see_all(page):
    """Open what is folded, and scroll through the page, so that all of it is drawn."""
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    for part in page.locator("section").all():
        if part.is_visible():
            part.scroll_into_view_if_needed()
    page.locator(".plot").first.focus()
    page.keyboard.press("End")


CONTRAST = """() => {
  const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const over = (top, under) => [0, 1, 2].map((at) => top[at] * top[3] + under[at] * (1 - top[3])).concat(1);
  const light = ([r, g, b]) => [r, g, b].map((one) => one / 255)
    .map((one) => (one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
    .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (element) => {
    const found = [];
    for (let one = element; one; one = one.parentElement) found.push(parse(getComputedStyle(one).backgroundColor));
    return found.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]);
  };
  const low = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.textContent.trim() || !element.getClientRects().length || element.closest('script')) continue;
    const style = getComputedStyle(element), under = behind(element);
    const ink = over(parse(element.closest('svg') ? style.fill : style.color), under);
    const [a, b] = [light(ink), light(under)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) low.push(`${node.textContent.trim().slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return low;
}"""


def test_every_control_is_reached_by_the_tab_key_and_shows_it(report, opened):
    page = opened(report)
    controls = "a[href], button, select, input, summary, [tabindex='0']"
    shown = f"[...document.querySelectorAll({controls!r})].filter((one) => one.checkVisibility())"
    wanted = page.evaluate(f"{shown}.map((one, at) => {{ one.dataset.at = at; }}).length")
    reached, unmarked = set(), []
    for _ in range(wanted + 5):
        page.keyboard.press("Tab")
        at, outline, name = page.evaluate(
            "() => { const one = document.activeElement, style = getComputedStyle(one);"
            "return [one.dataset.at ?? null, style.outlineStyle === 'none' ? 0 : parseFloat(style.outlineWidth),"
            "one.getAttribute('aria-label') ?? one.labels?.[0]?.textContent ?? one.textContent]; }"
        )
        if at is not None:
            reached.add(at)
            assert name.strip()
            if outline < 2:
                unmarked.append(name)
    assert len(reached) == wanted
    assert unmarked == []


def test_the_page_has_a_language_a_title_landmarks_headings_in_order_and_texts_for_pictures(report, opened):
    page = opened(report)
    see_all(page)
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.title() == "3 methods and Centralized on digits (label-1, label-2)"
    assert [page.locator(one).count() for one in ("header", "main", "nav", "h1")] == [1, 1, 1, 1]
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map((one) => Number(one.tagName[1]))")
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert page.locator("img").count() >= 2
    assert page.evaluate("[...document.images].filter((one) => !one.alt.trim()).length") == 0
    unnamed = (
        "[...document.querySelectorAll('svg, canvas')].filter((one) => !one.closest('[aria-hidden], [aria-label]'))"
    )
    assert page.evaluate(f"{unnamed}.map((one) => one.outerHTML)") == []
    assert (
        page.evaluate("new Set([...document.querySelectorAll('[id]')].map((one) => one.id)).size")
        == page.locator("[id]").count()
    )


@pytest.mark.parametrize("width", [375, 1100])
def test_what_is_clicked_is_large_enough_for_a_finger(report, opened, width):
    page = opened(report, width=width)
    small = page.evaluate(
        "[...document.querySelectorAll('button, select, summary, nav a, .controls label')]"
        ".filter((one) => one.checkVisibility() && Math.min(one.offsetWidth, one.offsetHeight) < 24)"
        ".map((one) => `${one.outerHTML}: ${one.offsetWidth} x ${one.offsetHeight}`)"
    )
    assert small == []


@pytest.mark.parametrize("scripts", [True, False])
def test_on_a_phone_nothing_is_wider_than_the_screen(report, opened, scripts):
    page = opened(report, width=375, java_script_enabled=scripts, is_mobile=True, device_scale_factor=2)
    if scripts:
        see_all(page)
    page.screenshot(path=report.parent / "phone.png")
    assert page.evaluate("document.documentElement.scrollWidth") <= 375 if scripts else True
    wide = [box["width"] for one in page.locator("main > *").all() if (box := one.bounding_box())]
    assert max(wide) <= 375


def test_a_matrix_of_many_classes_is_a_picture_with_a_text(opened, tmp_path):
    write_run(tmp_path / "runs", "fedavg", 1, 0)
    path = tmp_path / "runs" / "fedavg-1-0" / "result.json"
    confusion = [[5 if row == column else 1 for column in range(40)] for row in range(40)]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"measures": {"confusion": confusion}}))
    write_report([tmp_path / "runs"], tmp_path / "report", paper=False, target=None, json_output=True)
    page = opened(tmp_path / "report" / "report.html")
    page.get_by_role("heading", name="Confusion matrices").scroll_into_view_if_needed()
    picture = page.get_by_role("img", name="Confusion matrix of FedAvg")
    picture.wait_for()
    pixels = picture.evaluate("(one) => [...one.getContext('2d').getImageData(7, 7, 1, 2).data]")
    on, off = pixels[:4], pixels[4:]
    assert sum(on) < sum(off)  # what is right is more of its row, so darker
    assert on[3] == off[3] == 255


def test_without_scripts_tables_and_pictures_are_there(report, opened):
    page = opened(report, java_script_enabled=False)
    assert page.locator("main table").first.is_visible()
    for picture in page.locator("img").all():
        picture.scroll_into_view_if_needed()
        assert picture.is_visible()
    assert page.locator("img").count() == 2
    assert page.locator("button").count() == 0


def test_hostile_texts_stay_texts(report, opened, tmp_path):
    folder = shutil.copytree(report.parents[1] / "runs", tmp_path / "runs")
    hostile = "</script><img src=x onerror=alert(1)><b>"
    for path in folder.glob("*/result.json"):
        result = json.loads(path.read_text())
        path.write_text(json.dumps(result | {"data_note": hostile, "titles": {"algorithm": hostile}}))
    write_report([folder], tmp_path / "report", paper=False, target=None, json_output=True)
    page = opened(tmp_path / "report" / "report.html")
    plot(page)
    assert hostile in page.locator(".legend").inner_text()
    assert page.locator("main b b, img[src=x]").count() == 0


def test_a_page_of_200_runs_is_small_and_opens_within_a_second(opened, tmp_path, capsys):
    for split in range(1, 6):
        for number in range(20):
            for seed in (0, 1):
                write_run(tmp_path / "runs", f"method-{number}", split, seed, rounds=300)
    write_report([tmp_path / "runs"], tmp_path / "report", paper=False, target=None, json_output=True)
    path = tmp_path / "report" / "report.html"
    loads = []
    for _ in range(3):
        page = opened(path)
        loads.append(page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd"))
    plot(page)
    with capsys.disabled():
        print(f"\n200 runs: {path.stat().st_size / 1e6:.2f} MB, load event after {sorted(loads)[1]:.0f} ms")
    assert path.stat().st_size < 3_000_000
    assert page.locator(".legend [aria-pressed]").count() == 20
    assert "200 rounds are drawn" in page.locator("main").inner_text()

"""The page in a real Chromium, from a file: what is hovered, clicked and typed there, and what it takes to open."""

import json
import shutil

import pytest

from fl_sim.cli.report import write_report

pytestmark = pytest.mark.cluster


def names_in(page, plot_number=0):
    return page.locator(".plot").nth(plot_number).locator(".curve").count()


def test_the_pointer_and_the_arrow_keys_show_every_method_s_value_in_a_round(report, opened, plot):
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


def test_the_values_in_a_round_stand_below_the_chart_and_cover_none_of_it(report, opened, plot):
    page = opened(report)
    first = plot(page)
    for place in (0.2, 0.5, 0.9):
        box = first.bounding_box()
        page.mouse.move(box["x"] + place * box["width"], box["y"] + 100)
        tip = first.locator(".tip").bounding_box()
        assert tip["y"] >= box["y"] + box["height"] - 1
        assert tip["x"] >= box["x"]
        assert tip["x"] + tip["width"] <= box["x"] + box["width"] + 1


def test_axes_have_names_and_accuracies_span_their_range_unless_all_of_it_is_asked_for(report, opened, plot):
    page = opened(report)
    first = plot(page)
    assert first.locator(".axis-name").text_content() == "test accuracy (%)"
    page.locator(".rows").first.scroll_into_view_if_needed()
    assert page.locator(".rows .axis-name").first.inner_text() == "test accuracy (%)"

    def ticks():
        return [float(one) for one in first.locator("text.tick[text-anchor=end]").all_text_contents()]

    assert max(ticks()) < 80
    rows = page.locator(".rows .scale").first.locator("text")
    assert float(rows.first.text_content()) > 0
    assert rows.count() >= 3
    page.get_by_label("accuracy from 0 to 100 %").check()
    assert [rows.first.text_content(), rows.last.text_content()] == ["0", "100"]
    assert (min(ticks()), max(ticks())) == (0, 100)
    page.get_by_label("Show").select_option("loss")
    assert first.locator(".axis-name").text_content() == "test loss (nats)"


def test_bands_of_more_than_four_methods_are_bars_beside_the_last_round(opened, tmp_path, plot, write_run):
    for kind in ("fedavg", "fedprox", "scaffold", "fednova", "feddyn"):
        for seed in (0, 1):
            write_run(tmp_path / "runs", kind, 1, seed)
    write_report([tmp_path / "runs"], tmp_path / "report", paper=False, pictures=False, target=None, json_output=True)
    page = opened(tmp_path / "report" / "report.html")
    first = plot(page)
    assert (first.locator(".band").count(), first.locator(".end-bar").count()) == (0, 5)
    page.locator(".legend button", has_text="FedProx").click()
    assert (first.locator(".band").count(), first.locator(".end-bar").count()) == (4, 0)


def test_paper_has_every_figure_in_light_colours_also_those_that_no_screen_has_shown(report, opened):
    page = opened(report, scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("[...document.querySelectorAll('.plot')].every((one) => one.querySelector('.curve'))")
    assert page.locator(".panels .rows").count() == page.locator(".panel").count() - page.locator(".plot").count()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator(".controls").first.is_hidden()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 23, 29)"


def test_a_finger_shows_the_values_where_it_was(report, opened, plot):
    page = opened(report, width=375, is_mobile=True, has_touch=True)
    first = plot(page)
    first.tap()
    assert first.locator(".tip").inner_text().startswith("round 6\n")
    box = first.locator(".tip").bounding_box()
    assert 0 <= box["x"] <= box["x"] + box["width"] <= 375


def test_a_click_on_the_legend_hides_a_method_in_all_figures_and_shows_it_again(report, opened, plot):
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


def test_the_axes_are_switched_to_a_log_scale_bytes_seconds_and_epsilon(report, opened, plot):
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


def test_every_measure_is_drawn_over_every_axis_on_either_scale(report, opened, plot):
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
    table.locator("tbody td").nth(place).evaluate("(one) => { one.textContent = '- (0 of 2)'; }")
    head.locator("button").click()
    assert (
        "- (0 of 2)" in table.locator("tbody tr:not(.bound)").last.inner_text()
    )  # what is not told is no small number


def test_what_all_rows_share_is_said_once(report, opened):
    page = opened(report)
    table = page.locator("main table").first
    assert "Model" not in table.locator("thead").inner_text()
    assert (
        page.locator(".common").first.inner_text()
        == "In all rows: data digits; clients 10 (except the upper bound); model mlp; status finished."
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


def test_a_matrix_of_many_classes_is_a_picture_with_a_text(opened, tmp_path, write_run):
    write_run(tmp_path / "runs", "fedavg", 1, 0)
    path = tmp_path / "runs" / "fedavg-1-0" / "result.json"
    confusion = [[5 if row == column else 1 for column in range(40)] for row in range(40)]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"measures": {"confusion": confusion}}))
    write_report([tmp_path / "runs"], tmp_path / "report", paper=False, pictures=False, target=None, json_output=True)
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


def test_hostile_texts_stay_texts(report, opened, tmp_path, plot):
    folder = shutil.copytree(report.parents[1] / "runs", tmp_path / "runs")
    hostile = "</script><img src=x onerror=alert(1)><b>"
    for path in folder.glob("*/result.json"):
        result = json.loads(path.read_text())
        path.write_text(json.dumps(result | {"data_note": hostile, "titles": {"algorithm": hostile}}))
    write_report([folder], tmp_path / "report", paper=False, pictures=False, target=None, json_output=True)
    page = opened(tmp_path / "report" / "report.html")
    plot(page)
    assert hostile in page.locator(".legend").inner_text()
    assert page.locator("main b b, img[src=x]").count() == 0


def test_a_page_of_200_runs_is_small_and_opens_within_a_second(opened, tmp_path, capsys, plot, write_run):
    for split in range(1, 6):
        for number in range(20):
            for seed in (0, 1):
                write_run(tmp_path / "runs", f"method-{number}", split, seed, rounds=300)
    write_report([tmp_path / "runs"], tmp_path / "report", paper=False, pictures=False, target=None, json_output=True)
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

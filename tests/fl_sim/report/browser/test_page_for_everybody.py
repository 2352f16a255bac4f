"""The page by keyboard, by finger, on a phone, in dark colours, and read aloud: checked in a real Chromium."""

import itertools

import pytest

pytestmark = pytest.mark.cluster


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


def test_a_table_that_is_wider_than_a_phone_is_scrolled_by_the_arrow_keys(report, opened):
    page = opened(report, width=375)
    wide = page.locator(".wide").first
    assert wide.get_attribute("tabindex") == "0"
    told = "getComputedStyle(one, '::before').content"
    assert "scroll it sideways" in wide.evaluate(f"(one) => {told}")
    wide.focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    page.wait_for_timeout(300)
    assert wide.evaluate("(one) => one.scrollLeft") > 0
    page.set_viewport_size({"width": 1300, "height": 900})
    page.wait_for_timeout(300)
    assert wide.get_attribute("tabindex") is None
    assert wide.evaluate(f"(one) => {told}") == "none"


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

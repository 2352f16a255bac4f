"""The site in a real Chromium, from files: no network is asked for anything, the search finds, and it fits a phone."""

import shutil

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PAGES = ["index", "quickstart", "concepts", "settings", "commands", "faq", "notebooks/first_table", "tutorials/da-fl"]

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--headless", "--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def opened(site, chromium):
    """Open a page of the site, and collect what goes wrong in it and what it asks of a network."""
    troubles = []
    pages = []

    def open_page(name, width=1280):
        page = chromium.new_page(viewport={"width": width, "height": 900})
        pages.append(page)
        page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on(
            "request",
            lambda asked: None if asked.url.startswith(("file:", "data:", "blob:")) else troubles.append(asked.url),
        )
        page.goto((site / f"{name}.html").as_uri())
        return page

    yield open_page
    for page in pages:
        page.close()
    assert troubles == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_from_a_file_and_fits_a_phone(opened, name):
    page = opened(name, width=390)
    page.wait_for_load_state()
    assert page.locator("h1").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_search_finds_without_a_server(opened):
    page = opened("tutorials/da-fl")
    page.click(".md-search__input")
    page.keyboard.type("dirichlet")
    page.wait_for_selector(".md-search-result__link", timeout=20_000)
    assert page.locator(".md-search-result__link").count() >= 3


def test_pictures_have_words_and_the_scheme_changes(opened):
    page = opened("concepts")
    assert page.locator("article img").count() == 1
    assert page.eval_on_selector_all("img", "all => all.filter(one => !one.alt).length") == 0
    assert page.get_attribute("body", "data-md-color-scheme") == "default"
    page.click("label[for=__palette_1]")
    page.wait_for_selector("body[data-md-color-scheme=slate]")

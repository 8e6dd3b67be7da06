"""The page as a person uses it, in headless Chromium."""

from __future__ import annotations

import shutil
import threading

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from served import Backwards, build, documents, encoder, index, make_service, running

from revela.types import Document

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --window-size=1100,900"
)
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs Debian's packages chromium and chromium-driver"
)
TRICKY = Document(
    "tricky",
    "zebra <img src=x onerror=\"document.title='broken'\"> zebras and a Zebra's stripes",
    "<b>Markup</b> & more",
    metadata={"year": 1990, "lang": "it's"},
)


class Held:
    """An index whose answer to "hold" waits."""

    def __init__(self, index) -> None:
        self.index, self.open, self.asked = index, threading.Event(), []

    def __getattr__(self, name):
        return getattr(self.index, name)

    def __len__(self):
        return len(self.index)

    def search(self, query, *more, **named):
        self.asked.append(query)
        if query.startswith("hold"):
            assert self.open.wait(60)
        return self.index.search(query, *more, **named)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def held(encoder, tmp_path_factory) -> Held:
    return Held(
        build(
            tmp_path_factory.mktemp("page") / "index",
            [*documents(40, 6), TRICKY],
            encoder,
            ("year", "lang"),
        )
    )


@pytest.fixture(scope="module")
def site(make_service, held):
    service = make_service(reranker=Backwards())
    service.index = held
    with running(service) as up:
        yield up


@pytest.fixture
def page(browser, site):
    browser.get("about:blank")
    browser.get(site.url + "/")
    return browser


def wait(page, condition):
    return WebDriverWait(page, 60, poll_frequency=0.05).until(lambda _: condition())


def titles(page):
    return page.execute_script(
        "return [...document.querySelectorAll('#results h2')].map((h) => h.textContent)"
    )


def status(page):
    return page.find_element(By.ID, "status").text


def ask(page, text):
    box = page.find_element(By.ID, "query")
    box.clear()
    box.send_keys(text)
    return box


def test_results_come_as_one_types_with_words_marked_and_markup_shown_as_text(page):
    ask(page, "zebra")
    wait(page, lambda: titles(page)[:1] == ["<b>Markup</b> & more"])
    marks = [
        mark.text for mark in page.find_elements(By.CSS_SELECTOR, "#results li:first-child mark")
    ]
    assert marks == ["zebra", "zebras", "Zebra"] and page.title == "revela"
    assert page.find_elements(By.CSS_SELECTOR, "#results img, #results b") == []
    assert "10 results" in status(page) and page.current_url.endswith("#q=zebra")
    assert page.find_element(By.ID, "model").text == "41 passages · tiny"


def test_modes_are_switched_and_kept_in_the_address(page, site):
    ask(page, "zebra")
    wait(page, lambda: len(titles(page)) == 10)
    page.find_element(By.CSS_SELECTOR, "input[value=lexical]").click()
    wait(page, lambda: titles(page) == ["<b>Markup</b> & more"])
    assert "1 result ·" in status(page) and page.current_url.endswith("#q=zebra&mode=lexical")
    page.refresh()
    wait(page, lambda: titles(page) == ["<b>Markup</b> & more"])
    assert page.find_element(By.CSS_SELECTOR, "input[value=lexical]").is_selected()


def test_filters_are_typed_or_pressed_and_wrong_ones_are_explained(page):
    ask(page, "zebra")
    wait(page, lambda: len(titles(page)) == 10)
    page.find_element(By.ID, "filters").click()
    field = page.switch_to.active_element
    assert field.get_attribute(
        "id"
    ) == "filter" and "year, lang, such as: year > 2020" in field.get_attribute("placeholder")
    field.send_keys("year >= 2038")
    wait(page, lambda: len(titles(page)) == 2)
    field.send_keys(Keys.CONTROL, "a", Keys.NULL, Keys.BACKSPACE)
    field.send_keys("year >")
    wait(page, lambda: "filter" in status(page))
    field.send_keys(Keys.CONTROL, "a", Keys.NULL, Keys.BACKSPACE)
    wait(page, lambda: len(titles(page)) == 10)
    page.find_elements(By.CSS_SELECTOR, "#results li:first-child .facts button")[1].click()
    wait(page, lambda: len(titles(page)) == 1)
    assert field.get_attribute("value") == "lang = 'it''s'" and "where=" in page.current_url
    page.refresh()
    wait(page, lambda: len(titles(page)) == 1)
    page.find_element(By.ID, "filters").click()
    wait(page, lambda: len(titles(page)) == 10)


def test_what_was_found_is_ordered_again_by_one_of_two_ways(page, held, encoder):
    ask(page, "ocean01 and more")
    wait(page, lambda: len(titles(page)) == 10)
    for pressed, again, mode in (
        ("tokens", "tokens", "hybrid"),
        ("heads", "heads", "hybrid"),
        ("heads", None, "hybrid"),
    ):
        page.find_element(By.CSS_SELECTOR, f".rerank[value={pressed}]").click()
        how = Backwards() if again == "heads" else again
        hits = held.search("ocean01 and more", 10, mode, None, "score", how)
        wanted = [hit.title for hit in hits]
        wait(page, lambda wanted=wanted: titles(page) == wanted)
        shown = {
            button.get_attribute("value"): button.get_attribute("aria-pressed")
            for button in page.find_elements(By.CLASS_NAME, "rerank")
        }
        assert shown == {way: str(way == again).lower() for way in ("tokens", "heads")}


def test_the_keyboard_is_enough(page):
    body, box = page.find_element(By.TAG_NAME, "body"), page.find_element(By.ID, "query")
    page.execute_script("document.activeElement.blur()")
    body.send_keys("/")
    assert page.switch_to.active_element == box and box.get_attribute("value") == ""
    box.send_keys("ocean01", Keys.ENTER)
    wait(page, lambda: len(titles(page)) == 10)
    box.send_keys(Keys.ARROW_DOWN)
    first = page.switch_to.active_element
    assert first.tag_name == "button" and first.get_attribute("aria-expanded") == "false"
    height = page.find_element(By.CSS_SELECTOR, "#results p").size["height"]
    first.send_keys(Keys.ENTER)
    assert first.get_attribute("aria-expanded") == "true"
    assert page.find_element(By.CSS_SELECTOR, "#results p").size["height"] >= height
    first.send_keys(Keys.ARROW_DOWN)
    second = page.switch_to.active_element
    assert second != first
    second.send_keys(Keys.ARROW_UP)
    page.switch_to.active_element.send_keys(Keys.ARROW_UP)
    assert page.switch_to.active_element == box
    box.send_keys(Keys.ESCAPE)
    wait(page, lambda: titles(page) == [])
    assert box.get_attribute("value") == "" and status(page) == ""


def test_an_answer_that_comes_late_is_dropped(page, held):
    held.open.clear()
    ask(page, "hold")
    wait(page, lambda: "hold" in held.asked)
    ask(page, "zebra")
    wait(page, lambda: titles(page)[:1] == ["<b>Markup</b> & more"])
    held.open.set()
    page.execute_async_script("setTimeout(arguments[0], 400)")
    assert titles(page)[0] == "<b>Markup</b> & more"


def test_typing_fast_asks_once_and_more_are_shown_on_demand(page, held):
    wait(page, lambda: page.find_element(By.ID, "query").is_displayed())
    held.asked.clear()
    page.execute_script(
        "for (const text of ['e', 'en', 'eng', 'engine1']) "
        "{ query.value = text; query.dispatchEvent(new Event('input', {bubbles: true})); }"
    )
    wait(page, lambda: len(titles(page)) == 10)
    assert held.asked == ["engine1"]
    page.find_element(By.ID, "more").click()
    wait(page, lambda: len(titles(page)) == 20)


def test_nothing_comes_from_elsewhere_and_nothing_is_refused_by_the_policy(page, site):
    ask(page, "zebra")
    wait(page, lambda: titles(page))
    loaded = page.execute_script(
        "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    )
    assert loaded and all(name.startswith((site.url, "data:")) for name in loaded)
    assert [
        entry for entry in page.get_log("browser") if "Content Security Policy" in entry["message"]
    ] == []
    page.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.injected = 1'; "
        "document.body.append(s)"
    )
    assert page.execute_script("return window.injected") is None


@pytest.mark.parametrize("width", [360, 1100])
def test_no_width_scrolls_sideways_and_every_field_has_a_name(page, width):
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 740, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    ask(page, "zebra")
    wait(page, lambda: titles(page))
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    names = page.execute_script(
        "return [...document.querySelectorAll('input')]"
        ".map((i) => i.labels.length && i.labels[0].textContent.trim())"
    )
    assert all(names)
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_token_is_asked_for_and_errors_are_shown(browser, make_service):
    with running(make_service(token="sesame")) as site:
        browser.get(site.url + "/")
        ask(browser, "ocean01")
        field = browser.find_element(By.ID, "token")
        wait(browser, field.is_displayed)
        assert "token is missing or wrong" in status(browser) and titles(browser) == []
        field.send_keys("sesame", Keys.ENTER)
        wait(browser, lambda: len(titles(browser)) == 10)
    ask(browser, "garden01")
    wait(browser, lambda: "cannot be reached" in status(browser))

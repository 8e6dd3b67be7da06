"""The page as a person uses it, in headless Chromium."""

from __future__ import annotations

import shutil
import threading

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from served import build, documents, encoder, index, make_service, running

from revela.searching.server import Site
from revela.searching.snippets import heading_of
from revela.types import Document

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --window-size=1100,900"
)
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs Debian's packages chromium and chromium-driver"
)
MARKUP = "<b>Markup</b> & more"
LONG = Document(
    "notes/long.md",
    "# Long\n\n" + "Filler words stand. " * 20 + "The **axolotl** sleeps.\n\n[x](y) النهاية",
    metadata={"year": 1991, "lang": "en"},
)
TRICKY = Document(
    "tricky",
    "zebra <img src=x onerror=\"document.title='broken'\"> zebras and a Zebra's stripes",
    MARKUP,
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
    folder, rows = tmp_path_factory.mktemp("page") / "index", [*documents(40, 6), TRICKY, LONG]
    return Held(build(folder, rows, encoder, ("year", "lang")))


@pytest.fixture(scope="module")
def site(make_service, held):
    service = make_service()
    service.index = held
    with running(service) as up:
        yield up


@pytest.fixture
def page(browser, site):
    browser.get("about:blank")
    browser.get(site.url + "/")
    return browser


def wait(page, condition):
    return WebDriverWait(page, 20, poll_frequency=0.05).until(lambda _: condition())


def titles(page):
    found = "[...document.querySelectorAll('#results h2')].map((h) => h.textContent)"
    return page.execute_script(f"return {found}")


def asked(page, text, count=10):
    """Ask, and wait for so many results."""
    ask(page, text)
    wait(page, lambda: len(titles(page)) == count)


def field_of(page, css):
    return page.find_element(By.CSS_SELECTOR, css)


def status(page):
    return field_of(page, "#status").text


def ask(page, text):
    box = field_of(page, "#query")
    box.clear()
    box.send_keys(text)


def test_results_come_as_one_types_with_words_marked_and_markup_shown_as_text(page):
    ask(page, "zebra")
    wait(page, lambda: titles(page)[:1] == [MARKUP])
    marks = page.find_elements(By.CSS_SELECTOR, "#results li:first-child mark")
    assert [mark.text for mark in marks] == ["zebra", "zebras", "Zebra"] and page.title == "revela"
    assert page.find_elements(By.CSS_SELECTOR, "#results img, #results b") == []
    assert "10 results" in status(page) and page.current_url.endswith("/?q=zebra")
    about = field_of(page, "#about").text
    assert about.startswith("42 documents · last change ") and about.endswith(" · tiny")


def test_a_card_shows_the_answer_and_opens_to_all_of_its_passage(page):
    field_of(page, "input[value=lexical]").click()
    ask(page, "where does the axolotl sleep")
    wait(page, lambda: titles(page)[:1] == ["Long"])
    card = field_of(page, "#results li")
    passage = card.find_element(By.CSS_SELECTOR, "p")
    assert [mark.text for mark in card.find_elements(By.TAG_NAME, "mark")] == ["axolotl", "sleeps"]
    assert passage.text.startswith("… Filler") and passage.text.endswith("sleeps.\nx النهاية")
    short = passage.text
    passage.click()
    assert len(passage.text) > len(short) and "**" not in passage.text
    assert [mark.text for mark in card.find_elements(By.TAG_NAME, "mark")] == ["axolotl", "sleeps"]
    assert "notes/long.md" in card.text and "line 3" in card.text
    passage.click()
    assert passage.text == short


def test_whether_there_is_an_answer_is_said_in_words(page):
    asked(page, "zebra")
    verdict, hit = field_of(page, "#verdict"), "{...found.data[0], rank: 1, same_as: null}"
    answer = "{ query: 'zebra', mode: 'lexical', marked: true }"
    for given, words in [
        ("unlikely", "Probably no answer in these documents"),
        ("elsewhere", "Probably no answer, as these documents are about other things"),
        ("perhaps", "Perhaps"),
        ("sure", "Sure"),
        ("null", "Confidence unknown"),
        ("another", ""),
    ]:
        page.execute_async_script(
            f"const done = arguments[0]; fetch('v1/search', {{ method: 'POST', headers: headers(), "
            f"body: JSON.stringify({answer}) }}).then((a) => a.json()).then((found) => "
            f"{{ show({{ answer: '{given}', data: [{hit}] }}); done(); }})"
        )
        assert words in verdict.text and verdict.is_displayed() == bool(words)
    page.execute_script("show({ note: 'By words only.', data: [] })")
    assert verdict.text == "By words only.", "shown without a hit, too"


def test_equal_texts_share_a_card_and_link_to_documents(browser, make_service, encoder, tmp_path):
    text = "The axolotl sleeps under stones."
    rows = [Document(f"dir/{name} b.txt", text) for name in ("a", "ä")]
    rows += [Document(f"d{i}", f"ocean{i}") for i in range(3)]
    service = make_service()
    service.index = build(tmp_path / "index", rows, encoder)
    service.site = Site("<i>my</i> notes", "https://example.org/docs/")
    with running(service) as site:
        browser.get(site.url + "/")
        wait(browser, lambda: field_of(browser, "#name").text == "<i>my</i> notes")
        asked(browser, text, 4)
        links = browser.find_elements(By.CSS_SELECTOR, "#results li:first-child .place a")
        addresses = {link.get_attribute("href") for link in links}
        start = "https://example.org/docs/dir/"
        assert addresses == {f"{start}a%20b.txt", f"{start}%C3%A4%20b.txt"}
        assert "the same text" in field_of(browser, "#results li").text
        assert field_of(browser, "#verdict").text.startswith("Confidence unknown")
        button = field_of(browser, "#results .place button")
        assert button.get_attribute("title").startswith("dir/") and button.text == "Copy path"
        button.click()
        wait(browser, lambda: "Copied" in button.text or "Not copied" in button.text)


def test_modes_are_switched_and_kept_in_the_address(page, site):
    asked(page, "zebra")
    field_of(page, "input[value=lexical]").click()
    wait(page, lambda: titles(page) == [MARKUP])
    assert "1 result ·" in status(page) and page.current_url.endswith("/?q=zebra&mode=lexical")
    page.refresh()
    wait(page, lambda: titles(page) == [MARKUP])
    assert field_of(page, "input[value=lexical]").is_selected()


def test_filters_are_typed_or_pressed_and_wrong_ones_are_explained(page):
    def results(count):
        wait(page, lambda: len(titles(page)) == count)

    def replace_by(text):
        field.send_keys(Keys.CONTROL, "a", Keys.NULL, Keys.BACKSPACE)
        field.send_keys(text)

    asked(page, "zebra")
    field_of(page, "#filters").click()
    field = page.switch_to.active_element
    assert field.get_attribute("id") == "filter"
    assert "year, lang, such as: year > 2020" in field.get_attribute("placeholder")
    field.send_keys("year >= 2038")
    results(2)
    replace_by("year >")
    wait(page, lambda: "filter" in status(page))
    replace_by("")
    results(10)
    page.find_elements(By.CSS_SELECTOR, "#results li:first-child .facts button")[1].click()
    results(1)
    assert field.get_attribute("value") == "lang = 'it''s'" and "where=" in page.current_url
    page.refresh()
    results(1)
    field_of(page, "#filters").click()  # closes them, and keeps what they say
    assert field_of(page, "#filters").text == "Filter (1)" and len(titles(page)) == 1


@pytest.fixture
def folder_site(make_service, encoder, tmp_path):
    docs = tmp_path / "docs"
    (docs / "mail").mkdir(parents=True)
    lines = [f"Paragraph {i} is about the garden0{i % 9}." for i in range(300)]
    lines[200] = "Here the axolotl **sleeps**, <b>really</b>."
    (docs / "long.md").write_text("---\ndate: 2021-05-01\n---\n# Long\n\n" + "\n\n".join(lines))
    sent = "From: a@b.c\nDate: Tue, 5 May 2020 10:00:00 +0200\nSubject: A castle\n\nThe axolotl."
    (docs / "mail" / "a.eml").write_text(sent)
    service = make_service(local_only=True)
    service.index = build(tmp_path / "index", [], encoder)
    service.index.sync(docs)
    with running(service) as up:
        yield up


def test_a_hit_is_opened_at_its_passage_and_back_closes_it(browser, folder_site):
    page = browser
    page.get(folder_site.url + "/?q=axolotl&mode=lexical")
    wait(page, lambda: titles(page) == ["A castle", "Long"])
    card = page.find_elements(By.CSS_SELECTOR, "#results li")[1]
    assert "2021-05-01" in card.text
    card.find_element(By.CSS_SELECTOR, "h2 button").click()
    wait(page, lambda: page.find_elements(By.CSS_SELECTOR, "#text .here mark"))
    here = field_of(page, "#text .here")
    assert "Here the axolotl sleeps, really." in here.text and here.is_displayed()
    box, frame = (
        page.execute_script("return arguments[0].getBoundingClientRect()", e)
        for e in (here, field_of(page, "#text"))
    )
    assert frame["top"] <= box["top"] + box["height"] and box["top"] <= frame["bottom"]
    assert "passages before" in field_of(page, "#text").text
    link = field_of(page, "#source a")
    assert link.text == "Open file" and link.get_attribute("href").endswith("/v1/files/long.md")
    page.back()
    wait(page, lambda: not field_of(page, "#reader").is_displayed())
    assert titles(page) == ["A castle", "Long"] and "?q=axolotl" in page.current_url
    card.find_element(By.CSS_SELECTOR, "h2 button").click()
    wait(page, lambda: page.find_elements(By.CSS_SELECTOR, "#text .here mark"))
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    wait(page, lambda: not field_of(page, "#reader").is_displayed())
    assert titles(page) == ["A castle", "Long"]
    link = page.find_elements(By.CSS_SELECTOR, "#results .place a")[0].get_attribute("href")
    page.get(link)
    assert "Subject: A castle" in page.page_source


def test_results_are_filtered_by_date_and_folder_and_back_leads_to_the_last_search(
    browser, folder_site
):
    page = browser
    page.get(folder_site.url + "/?q=axolotl&mode=lexical")
    wait(page, lambda: titles(page) == ["A castle", "Long"])
    page.execute_script("changed = 0")  # as after a pause
    field_of(page, "#filters").click()
    assert not field_of(page, "#columns").is_displayed()
    by = "form.elements.since"
    page.execute_script(
        f"{by}.value = '2021-01-01'; {by}.dispatchEvent(new Event('input', {{bubbles: true}}))"
    )
    wait(page, lambda: titles(page) == ["Long"])
    assert "since=2021-01-01" in page.current_url
    page.execute_script("changed = 0")
    ask(page, "castle")
    wait(page, lambda: titles(page) == [] and "Nothing found with this filter" in status(page))
    page.back()
    wait(page, lambda: titles(page) == ["Long"])
    assert field_of(page, "#query").get_attribute("value") == "axolotl"
    page.back()
    wait(page, lambda: titles(page) == ["A castle", "Long"])
    assert not field_of(page, "#narrow").is_displayed()


def test_what_was_found_is_ordered_again_or_not(page, held):
    asked(page, "ocean01 and more")
    button = field_of(page, "#rerank")
    wait(page, button.is_displayed)
    for how in ("late-interaction", "none"):
        button.click()
        wanted = [heading_of(hit) for hit in held.search("ocean01 and more", 10, rerank=how)]
        wait(page, lambda wanted=wanted: titles(page) == wanted)
        assert button.get_attribute("aria-pressed") == str(how == "late-interaction").lower()


def test_an_index_that_re_ranks_says_so_and_can_be_told_not_to(page, site, held, monkeypatch):
    monkeypatch.setattr(held.index, "_default_rerank", "late-interaction")
    page.get(site.url + "/?again")
    button = field_of(page, "#rerank")
    wait(page, lambda: button.get_attribute("aria-pressed") == "true")
    button.click()
    wanted = [heading_of(hit) for hit in held.search("ocean01 and more", 10, rerank="none")]
    ask(page, "ocean01 and more")
    wait(page, lambda: titles(page) == wanted)


def test_the_keyboard_is_enough(page):
    body, box = field_of(page, "body"), field_of(page, "#query")
    page.execute_script("document.activeElement.blur()")
    body.send_keys("/")
    assert page.switch_to.active_element == box and box.get_attribute("value") == ""
    box.send_keys("ocean01", Keys.ENTER)
    wait(page, lambda: len(titles(page)) == 10)
    box.send_keys(Keys.ARROW_DOWN)
    first = page.switch_to.active_element
    first.send_keys(Keys.ENTER)
    wait(page, lambda: page.find_elements(By.CSS_SELECTOR, "#text .here"))
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    wait(page, lambda: page.switch_to.active_element == first)
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
    wait(page, lambda: titles(page)[:1] == [MARKUP])
    held.open.set()
    page.execute_async_script("setTimeout(arguments[0], 400)")
    assert titles(page)[0] == MARKUP


def test_typing_fast_asks_once_and_more_are_shown_on_demand(page, held):
    wait(page, lambda: field_of(page, "#query").is_displayed())
    held.asked.clear()
    page.execute_script(
        "for (const text of ['e', 'en', 'eng', 'engine1']) "
        "{ query.value = text; query.dispatchEvent(new Event('input', {bubbles: true})); }"
    )
    wait(page, lambda: len(titles(page)) == 10)
    assert held.asked == ["engine1"]
    field_of(page, "#more").click()
    wait(page, lambda: len(titles(page)) == 20)


def test_nothing_comes_from_elsewhere_and_nothing_is_refused_by_the_policy(page, site):
    asked(page, "zebra")
    names = "performance.getEntriesByType('resource').map((entry) => entry.name)"
    loaded = page.execute_script(f"return {names}")
    assert loaded and all(name.startswith((site.url, "data:")) for name in loaded)
    log = [entry["message"] for entry in page.get_log("browser")]
    assert not [message for message in log if "Content Security Policy" in message]
    page.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.injected = 1'; "
        "document.body.append(s)"
    )
    assert page.execute_script("return window.injected") is None


@pytest.mark.parametrize("width", [360, 1100])
def test_no_width_scrolls_sideways_and_every_field_has_a_name(page, width):
    sizes = {"width": width, "height": 740, "deviceScaleFactor": 1, "mobile": width < 600}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", sizes)
    asked(page, "zebra")
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
        field = field_of(browser, "#token")
        wait(browser, field.is_displayed)
        assert "token is missing or wrong" in status(browser) and titles(browser) == []
        field.send_keys("sesame", Keys.ENTER)
        wait(browser, lambda: len(titles(browser)) == 10)
    ask(browser, "garden01")
    wait(browser, lambda: "cannot be reached" in status(browser))

"""The report in headless Chromium, light and dark, wide and narrow: nothing is fetched, and nothing
is wider than the window.
"""

from __future__ import annotations

import shutil

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from test_report import HOSTILE, SCORES, a_comparison, a_probe, write_run

from revela.evaluation.report import report

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs Debian's packages chromium and chromium-driver"
)
FLAGS = ["headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"]
FLAGS += ["disable-background-networking", "disable-component-update"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = Options()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    run = write_run(
        folder / "a-run-with-a-rather-long-name-that-has-no-place-to-break",
        scores=SCORES,
        probe=a_probe(-0.02),
        model=HOSTILE,
    )
    report([run, a_comparison(folder / "runs")], folder / "page.html")
    return (folder / "page.html").as_uri()


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read(browser, page, scheme, width):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
    )
    browser.get(page)

    def style(selector: str, name: str) -> list[int]:
        found = browser.execute_script(
            "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]",
            selector,
            name,
        )
        return [int(part) for part in found.removeprefix("rgb(").removesuffix(")").split(",")]

    root = "document.documentElement"
    hidden = browser.execute_script(f"return {root}.scrollWidth - {root}.clientWidth")
    assert hidden == 0 and browser.execute_script("return innerWidth") == width
    drawings = "[...document.querySelectorAll('svg')].map(s => s.clientWidth)"
    assert min(browser.execute_script(f"return {drawings}")) > 250
    paper, ink = style("body", "backgroundColor"), style("body", "color")
    assert (sum(paper) > sum(ink)) == (scheme == "light") and abs(sum(paper) - sum(ink)) > 500
    assert style("svg text", "fill") == ink
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert browser.get_log("browser") == []  # no error, nothing refused by the page's own policy

"""The report: its tables, that the page is self-contained and runs nothing, and what is refused."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from revela.errors import RevelaError
from revela.training.plots import Plot, smooth
from revela.training.record import outcome_in_words
from revela.training.report import read_results, report
from tests.collection_folder import write_lines

HOSTILE = "<script>alert(1)</script>\"><img src=x onerror='alert(2)'>{{ 7 * 7 }} $x_$"
ABOUT: dict[str, Any] = {
    "corpus": "docs",
    "command": "revela train docs --out a",
    "documents": 1234,
    "chunks": 5678,
    "groups": 99,
    "bm25": {"title": 0.5},
    "untrained": {"title": 0.3},
    "versions": {"torch": "2.13.0"},
    "hardware": {"threads": 2},
}


class Page(HTMLParser):
    """A parsed page: tables by section and caption ({row: {column: text}}), marked cells, elements
    with their attributes, and all text.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, dict[str, dict[str, str]]] = {}
        self.best: list[tuple[str, str, str]] = []
        self.open: list[str] = []
        self.text = ""
        self._section, self._caption, self._rows, self._marked = "", "", [], []
        self.feed(self.source)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "use", "path"):
            self.open.append(tag)
        if tag == "section":
            self._section = dict(attrs)["id"]
        elif tag == "table":
            self._caption, self._rows, self._marked = "", [], []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("th", "td"):
            self._rows[-1].append("")
            if dict(attrs).get("class") == "best":
                self._marked.append((len(self._rows) - 1, len(self._rows[-1]) - 1))

    def handle_endtag(self, tag):
        if tag in ("meta", "use", "path"):
            return
        assert self.open.pop() == tag, f"{tag} is closed where another is open"
        if tag == "table":
            header, *rows = self._rows
            assert all(len(row) == len(header) for row in rows)
            name = f"{self._section} {self._caption}".strip()
            assert name not in self.tables
            self.tables[name] = {
                row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows
            }
            self.best += [(name, self._rows[r][0], header[c]) for r, c in self._marked]

    def handle_data(self, data):
        self.text += data
        if self.open[-1:] == ["caption"]:
            self._caption += data
        elif self.open[-1:] in (["th"], ["td"], ["small"]):
            self._rows[-1][-1] += data


def page_of(*paths: Path) -> Page:
    out = paths[0].parent / "page.html"
    report(paths, out)
    return Page(out)


def write_run(folder: Path, about=ABOUT, **settings: Any) -> Path:
    folder.mkdir(parents=True)
    recipe = {"method": "revela", "tau": 1.0, "lora_rank": 64, "kernel": "auto"}
    recipe |= {"model": "a-model", "lm": "an-lm"} | settings
    (folder / "run.json").write_text(json.dumps(recipe | ({"about": about} if about else {})))
    first: dict[str, Any] = {"step": 0, "minutes": 0.0, "tokens_read": 0, "check": {"title": 0.4}}
    end: dict[str, Any] = {"step": 4, "minutes": 4 / 60}
    losses = [{"step": step, "minutes": step / 60, "loss": 4.0 - step / 10} for step in (2, 4)]
    last = [end | {"check": {"title": 0.45}}, end | {"kept": 4, "tokens_read": 4321}]
    rows = [first, *losses, *last]
    write_lines(folder / "metrics.jsonl", rows)
    (folder / "modules.json").write_text("[]")
    return folder


def a_comparison(folder: Path) -> Path:
    for kind, tau in (("gated", 1.0), ("crop", 0.05)):
        for seed in (0, 1):
            write_run(folder / f"{kind}-{seed}", tau=tau)
    ends = {"gated, seed 0": 0.5, "gated, seed 1": 0.6, "crop, seed 0": 0.4, "crop, seed 1": 0.4}
    curves = {
        label: [
            {"minutes": 0.0, "tokens_read": 0, "judged": {"med": 0.3, "cosqa": 0.1}},
            {"minutes": 9.0, "tokens_read": 9, "judged": {"med": end, "cosqa": end / 2}},
        ]
        for label, end in ends.items()
    }
    content = {"bm25": {"med": 0.52, "cosqa": 0.2}, "curves": curves}
    (folder / "compare.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def page(tmp_path: Path) -> Page:
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", about=None, tau=0.25, made_up_by_a_later_version=3)
    (tmp_path / "b" / "modules.json").unlink()
    return page_of(a, b)


def test_label_free_scores_stand_beside_bm25_and_the_start(page):
    column = {row: cells["a"] for row, cells in page.tables["check title"].items()}
    rows = ("BM25", "untrained", "before the first step", "saved")
    assert column == dict(zip(rows, ("0.500", "0.300", "0.400", "0.450"), strict=True))
    assert ("check title", "BM25", "a") in page.best
    assert ("check title", "saved", "a") not in page.best
    assert page.tables["check title"]["BM25"]["b"] == ""  # not written down
    assert ("check title", "saved", "b") in page.best


def test_recipes_facts_and_environment(page):
    changed = page.tables["recipe Settings that differ from the defaults of the method"]
    assert changed["tau"] == {"a": "1.0", "b": "0.25"}
    assert changed["made_up_by_a_later_version"] == {"a": "", "b": "3"}
    assert "kernel" not in changed and "lora_rank" not in changed
    facts = page.tables["recipe"]
    assert facts["torch"] == {"a": "2.13.0", "b": ""} and facts["threads"] == {"a": "2", "b": ""}
    assert facts["documents"] == {"a": "1,234", "b": ""} and facts["tokens read"]["b"] == "4,321"
    assert facts["training took"]["b"] == "4.0 seconds"
    assert ABOUT["command"] in page.text


def test_a_run_has_the_models_and_settings_that_it_used(tmp_path):
    """Not those of its recipe that it did not read, nor the defaults of another method. The
    tokens of a run that was stopped after its last check are unknown.
    """
    read = {flag: {"name": f"used-{flag}", "digest": "0"} for flag in ("model", "lm")}
    gated = write_run(tmp_path / "gated", ABOUT | {"models": read})
    crop = write_run(tmp_path / "crop", ABOUT | {"models": {"model": read["model"]}})
    settings = json.loads((crop / "run.json").read_text()) | {
        "method": "contrastive-crop",
        "crop_window": 9,
    }
    for name in ("tau", "kernel"):
        del settings[name]
    (crop / "run.json").write_text(json.dumps(settings))
    (crop / "metrics.jsonl").write_text(
        '{"step": 2, "minutes": 0.1, "tokens_read": 9, "check": {}}\n'
        '{"step": 4, "minutes": 0.1, "loss": 1.0}\n'
    )
    page = page_of(gated, crop)
    facts = page.tables["recipe"]
    assert facts["retriever starts from"] == {"gated": "used-model", "crop": "used-model"}
    assert facts["language model"] == {"gated": "used-lm", "crop": ""}
    assert facts["tokens read"] == {"gated": "4,321", "crop": ""}
    changed = page.tables["recipe Settings that differ from the defaults of the method"]
    assert changed["crop_window"] == {"gated": "", "crop": "9"}
    assert not {"tau", "kernel", "mix", "lm_lora", "gate"} & changed.keys()


def test_curves_are_of_checks_and_losses(page):
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page.source)
    assert captions == ["title", "Loss, revela"]
    assert page.source.count("<svg") == 2


def test_a_comparison_gives_means_over_seeds_and_all_its_runs(tmp_path):
    page = page_of(a_comparison(tmp_path / "runs"))
    ends = page.tables["compared runs"]
    assert ends["med"] == {
        "BM25": "0.520",
        "gated": "0.550 from 0.300, seeds 0.500 to 0.600",
        "crop": "0.400 from 0.300, seeds 0.400 to 0.400",
    }
    assert ends["cosqa"]["gated"].startswith("0.275") and ends["mean"]["BM25"] == "0.360"
    best = [(row, system) for caption, row, system in page.best if caption == "compared runs"]
    assert best == [(row, "gated") for row in ("med", "cosqa", "mean")]
    runs = [f"{kind}, seed {seed}" for kind in ("gated", "crop") for seed in (0, 1)]
    assert list(page.tables["check title"]["saved"]) == runs
    keys = re.findall(r'<span style="--own: (#\w+)"', page.source)
    assert len(keys) == 6 and len(set(keys)) == 2  # two kinds, in each of three legends
    folders = [a_comparison(tmp_path / name / "runs") for name in "xy"]
    runs = page_of(*folders).tables["check title"]["saved"]
    assert {f"{folder}: gated, seed 0" for folder in folders} <= runs.keys()


def test_the_page_stands_alone_and_nothing_in_it_runs(tmp_path):
    about = ABOUT | {"corpus": HOSTILE, "command": HOSTILE, "versions": {HOSTILE: HOSTILE}}
    about["bm25"] = {HOSTILE: 0.5}
    odd = {"about": about, "model": HOSTILE, "method": HOSTILE}
    run = write_run(tmp_path / HOSTILE.replace("/", "|"), **odd)
    row = {"loss": 1.0, "check": {HOSTILE: 0.5}, "tokens_read": 1}
    lines = [json.dumps({"step": s, "minutes": s} | row) for s in range(3)]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    page = page_of(run, a_comparison(tmp_path / "runs"))
    assert page.text.count(HOSTILE) >= 10  # shown as it is, and not obeyed
    assert f"check {HOSTILE}" in page.tables
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "img", "link", "iframe", "object", "base", "form"}
    for tag, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "xlink:href", "data", "action"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    assert not re.search(r"@import|url\((?!#)|javascript:", page.source)
    metas = [a for tag, a in page.elements if tag == "meta"]
    policy = next(a["content"] for a in metas if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'") and "script" not in policy


@pytest.mark.parametrize(
    "start, saved, kept, words",
    [
        ({"a": 0.5}, {"a": 0.5}, 0, "did not help by the label-free check: the start was saved"),
        (
            {"a": 0.5, "b": 0.3},
            {"a": 0.6, "b": 0.3},
            40,
            "helped .*0.400 at .*, 0.450 after",
        ),
        ({"a": 0.5}, {"a": 0.504}, 4, "changed no more than chance"),
        ({"a": 0.5}, {"a": 0.4}, 1000, "made it worse .*after 1,000 steps, which was saved"),
        ({}, {}, 8, "the last state was saved unchecked"),
        ({"a": 0.5}, {}, 8, "the last state was saved unchecked"),
    ],
)
def test_what_a_run_has_done_is_said_in_words(start, saved, kept, words):
    assert re.search(words, outcome_in_words(start, saved, kept))


def test_the_page_begins_with_what_happened(page, tmp_path):
    said = re.findall(r'<p class="happened">(.*?)</p>', page.source)
    assert said[0].startswith("a: training helped by the label-free check: nDCG@10 0.400 at the")
    assert said[1] == "b: the run is not finished."
    (alone,) = re.findall(r'"happened">(.*?)</p>', page_of(write_run(tmp_path / "r")).source)
    assert alone.startswith("training helped")


def test_a_tie_is_no_win(tmp_path):
    assert page_of(write_run(tmp_path / "r", ABOUT | {"bm25": {"title": 0.453}})).best == []


def test_plots_are_drawn_as_svg():
    plot = Plot("t", "loss", [(series, [(0, 1), (1, 2)]) for series in range(20)], level=1.5)
    assert plot.svg() == plot.svg() and "http" not in plot.svg().replace("http://www.w3.org/", "")
    assert "<svg" in Plot("", "loss", []).svg()
    assert "NaN" not in Plot("", "y", [(0, [(0, float("nan")), (1, 2.0)])]).svg()


def test_smoothing_is_a_running_mean():
    values = [float(v * v % 17) for v in range(50)]
    for at, (x, mean) in enumerate(smooth(list(enumerate(values)))):
        window = [values[i] for i in range(50) if at - 5 < i <= at]
        assert x == at and mean == pytest.approx(sum(window) / len(window))
    assert smooth([(0.0, 1.0), (1.0, 3.0)]) == [(0.0, 1.0), (1.0, 3.0)]


def test_a_label_leads_to_no_folder_outside(tmp_path):
    folder = a_comparison(tmp_path / "runs")
    write_run(tmp_path / "other-0")
    comparison = json.loads((folder / "compare.json").read_text())
    comparison["curves"]["../other, seed 0"] = comparison["curves"]["gated, seed 0"]
    (folder / "compare.json").write_text(json.dumps(comparison))
    assert len(read_results([folder]).runs) == 4


POINT = {"minutes": 1, "tokens_read": 1, "judged": {}}
BAD_POINT = json.dumps({"bm25": {"med": 1}, "curves": {"a": [POINT]}})


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("run.json", "{", "run.json is damaged (Invalid JSON: "),
        ("run.json", '{"about": {"bm25": {"title": "high"}}}', "(about.bm25.title: Input should"),
        ("metrics.jsonl", '{"step": 0, "minutes": 0}\n{"step": 1, "min', "metrics.jsonl:2 is dam"),
        ("compare.json", BAD_POINT, "a has a point without a score on every collection"),
    ],
)
def test_a_damaged_file_is_one_sentence_and_leaves_the_page_as_it_was(
    tmp_path, file, content, message
):
    run = write_run(tmp_path / "a")
    (run / file).write_bytes(content.encode("latin-1"))
    refused(run, message)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none", "none does not exist: give folders of revela train"),
        ("", "is no run: give folders of revela train"),
        ("there.txt", "there.txt is no run: give folders"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, path, message):
    (tmp_path / "there.txt").write_text("no run")
    refused(tmp_path / path, message)


def refused(path: Path, message: str) -> None:
    out = path.parent / "page.html"
    for before in (None, "an older page"):
        if before:
            out.write_text(before)
        with pytest.raises(RevelaError, match=re.escape(message)) as caught:
            report([path], out)
        assert "\n" not in str(caught.value)
        assert (out.read_text() if out.exists() else None) == before


def test_a_run_named_twice_or_a_folder_as_page_is_refused(tmp_path):
    run = write_run(tmp_path / "a")
    with pytest.raises(RevelaError, match="is named twice"):
        report([run, tmp_path / "." / "a"], tmp_path / "page.html")
    with pytest.raises(RevelaError, match="is a folder: give the page a file name"):
        report([run], tmp_path)

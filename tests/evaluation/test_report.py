"""The report: its tables, that the page is self-contained and runs nothing, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from revela.errors import RevelaError
from revela.evaluation.html_report import Line, draw, report, smooth
from revela.evaluation.report_tables import merge
from revela.evaluation.results import Scores, SystemScores, read_results

HOSTILE = "<script>alert(1)</script>\"><img src=x onerror='alert(2)'>{{ 7 * 7 }}"
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
SCORES: dict[str, Any] = {
    "med": {
        "BM25": {
            "ndcg@10": 0.61,
            "map": 0.5,
            "queries": {"q1": {"ndcg@10": 1.0}, "q2": {"ndcg@10": 0.2}},
        },
        "a": {
            "ndcg@10": 0.7,
            "map": 0.4,
            "interval": [0.65, 0.75],
            "p": {"BM25": 0.004},
            "queries": {
                "q1": {"ndcg@10": 0.1, "text": "which one was lost"},
                "q2": {"ndcg@10": 0.9},
            },
        },
    },
    "how": "what is no collection is passed by",
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


def write_run(
    folder: Path,
    about: dict[str, Any] | None = ABOUT,
    scores: Any = None,
    probe: Any = None,
    **settings: Any,
) -> Path:
    folder.mkdir(parents=True)
    recipe = {
        "objective": "revela",
        "tau": 1.0,
        "lora_rank": 64,
        "model": "a-model",
        "lm": "an-lm",
        "kernel": "torch",
    } | settings
    (folder / "run.json").write_text(json.dumps(recipe | ({"about": about} if about else {})))
    rows: list[dict[str, Any]] = [
        {"step": 0, "minutes": 0.0, "tokens_read": 0, "check": {"title": 0.4}}
    ]
    rows += [{"step": step, "minutes": step / 60, "loss": 4.0 - step / 10} for step in (2, 4)]
    rows += [
        {"step": 4, "minutes": 4 / 60, "tokens_read": 4321, "check": {"title": 0.45}},
        {"step": 4, "minutes": 4 / 60, "kept": 4},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "modules.json").write_text("[]")
    for name, content in (("scores.json", scores), ("probe.json", probe)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder


def a_probe(slope: float) -> dict[str, Any]:
    def around(value: float) -> dict[str, float]:
        return {"value": value, "low": value - 0.01, "high": value + 0.01}

    tenths = [0.5 + place for place in range(10)]
    places = [around(0.8 + slope * t) for t in tenths]
    found = {
        "tenths": tenths,
        "places": places,
        "slope": around(slope),
        "drop": around(-9 * slope),
        "first_wins": around(0.9),
    }
    geometry = {
        "alignment": 0.5,
        "uniformity": -2.5,
        "anisotropy": 0.25,
        "effective_rank": 61.25,
        "pairs": 200,
        "width": 64,
    }
    return {"model": "a", "profiles": {"exact match": found}, "geometry": geometry}


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
    (folder / "compare.json").write_text(
        json.dumps({"bm25": {"med": 0.52, "cosqa": 0.2}, "curves": curves})
    )
    return folder


@pytest.fixture
def page(tmp_path: Path) -> Page:
    a = write_run(tmp_path / "a", scores=SCORES, probe=a_probe(-0.02))
    b = write_run(
        tmp_path / "b", about=None, tau=0.25, probe=a_probe(0.01), made_up_by_a_later_version=3
    )
    (tmp_path / "b" / "modules.json").unlink()
    report([a, b], tmp_path / "page.html")
    return Page(tmp_path / "page.html")


def test_label_free_scores_stand_beside_bm25_and_the_start(page):
    column = {row: cells["a"] for row, cells in page.tables["check title"].items()}
    assert column == {
        "BM25": "0.500",
        "untrained": "0.300",
        "before the first step": "0.400",
        "saved": "0.450",
    }
    assert ("check title", "BM25", "a") in page.best
    assert ("check title", "saved", "a") not in page.best
    assert page.tables["check title"]["BM25"]["b"] == ""  # an older run did not write it down
    assert ("check title", "saved", "b") in page.best


def test_scores_have_margins_p_and_the_best_marked(page):
    scores = page.tables["judged med"]
    assert scores["BM25"]["nDCG@10"] == "0.610" and scores["a"]["nDCG@10"] == "0.700 ± 0.050"
    assert scores["a"]["p against BM25"] == "0.004" and scores["BM25"]["p against BM25"] == ""
    assert {("judged med", "a", "nDCG@10"), ("judged med", "BM25", "MAP")} <= set(page.best)
    assert "passed by" not in page.text


def test_a_task_of_another_kind_has_its_main_score(tmp_path):
    systems = {"a": {"main": 0.71, "settings": {"max_tokens": 512}}, "b": {"main": 0.6}}
    (tmp_path / "sts.json").write_text(json.dumps({"STS": systems}))
    report([tmp_path / "sts.json"], tmp_path / "page.html")
    assert Page(tmp_path / "page.html").tables["judged STS"] == {
        "a": {"main score": "0.710"},
        "b": {"main score": "0.600"},
    }


def test_worst_queries_are_those_lost_to_bm25(tmp_path):
    report([write_run(tmp_path / "a", scores=SCORES)], tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert page.tables["worst med"] == {"which one was lost": {"BM25": "1.000", "a": "0.100"}}
    assert "q2" not in page.text
    other = json.loads(json.dumps(SCORES))
    other["med"]["BM25"]["ndcg@10"] = 0.5  # retrievers are compared with the BM25 of their file
    report([tmp_path / "a", write_run(tmp_path / "b", scores=other)], tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    for name in "ab":
        lost = page.tables[f"worst med ({name})"]
        assert lost == {"which one was lost": {"BM25": "1.000", "a": "0.100"}}
    assert "BM25 (b)" in page.tables["judged med"]


def test_fusions_are_no_retrievers_where_queries_are_lost(tmp_path):
    scores = {"BM25": 0.5, "a": 0.4, "a + BM25": 0.9, "a + BM25 (RRF)": 0.9, "a + BM25 + tokens": 1}
    systems = {
        system: {"ndcg@10": score, "queries": {"q1": {"ndcg@10": score}}}
        for system, score in scores.items()
    }
    report([write_run(tmp_path / "a", scores={"med": systems})], tmp_path / "page.html")
    lost = Page(tmp_path / "page.html").tables["worst med"]
    assert lost == {"q1": {system: f"{score:.3f}" for system, score in scores.items()}}


def test_recipes_facts_and_environment(page):
    changed = page.tables["recipe Settings that differ from their defaults"]
    assert changed["tau"] == {"default": "1.0", "a": "1.0", "b": "0.25"}
    assert changed["made_up_by_a_later_version"] == {"default": "", "a": "", "b": "3"}
    assert "kernel" not in changed and "kernel" in page.tables["recipe All others"]
    environment, facts = page.tables["environment"], page.tables["recipe"]
    assert environment["torch"] == {"a": "2.13.0", "b": ""}
    assert environment["threads"] == {"a": "2", "b": ""}
    assert facts["documents"] == {"a": "1,234", "b": ""} and facts["tokens read"]["b"] == "4,321"
    assert facts["training took"]["b"] == "4.0 seconds"
    assert facts["state"] == {"a": "saved", "b": "not finished"}
    assert ABOUT["command"] in page.text


def test_probes_are_drawn_and_summed_up(page):
    slopes = page.tables["probes exact match"]["slope per tenth"]
    assert slopes == {"a": "-0.0200 -0.0300 to -0.0100", "b": "0.0100 0.0000 to 0.0200"}
    geometry = page.tables["probes Geometry of the vectors"]
    assert geometry["effective rank"] == {"a": "61.250", "b": "61.250"}
    assert geometry["pairs"]["a"] == "200"
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page.source)
    assert (
        captions == ["title", "Loss, objective revela", "Seconds per step", "exact match"]
        and page.source.count("<svg") == 4
    )


def test_a_comparison_gives_means_over_seeds_and_all_its_runs(tmp_path):
    report([a_comparison(tmp_path / "runs")], tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    ends = page.tables["compared runs"]
    assert ends["med"] == {
        "BM25": "0.520",
        "gated": "0.550 from 0.300, seeds 0.500 to 0.600",
        "crop": "0.400 from 0.300, seeds 0.400 to 0.400",
    }
    assert ends["cosqa"]["gated"].startswith("0.275") and ends["mean"]["BM25"] == "0.360"
    assert [(row, system) for caption, row, system in page.best if caption == "compared runs"] == [
        (r, "gated") for r in ("med", "cosqa", "mean")
    ]
    runs = [f"{kind}, seed {seed}" for kind in ("gated", "crop") for seed in (0, 1)]
    assert list(page.tables["check title"]["saved"]) == runs
    keys = re.findall(r'<span style="--own: var\(--series-[01]\)"', page.source)
    assert len(keys) == 6  # two kinds, in each of three legends


def test_two_comparisons_keep_their_runs_apart(tmp_path):
    report(
        [a_comparison(tmp_path / "x" / "runs"), a_comparison(tmp_path / "y" / "runs")],
        tmp_path / "page.html",
    )
    assert "x/runs: gated, seed 0" in Page(tmp_path / "page.html").tables["check title"]["saved"]


def test_the_page_stands_alone_and_nothing_in_it_runs(tmp_path):
    about = ABOUT | {
        "corpus": HOSTILE,
        "command": HOSTILE,
        "versions": {HOSTILE: HOSTILE},
        "bm25": {HOSTILE: 0.5},
    }
    asked = {"ndcg@10": 0.5, "queries": {"q": {"ndcg@10": 0.1, "text": HOSTILE}}}
    scores = {
        HOSTILE: {HOSTILE: asked, "BM25": {"ndcg@10": 0.6, "queries": {"q": {"ndcg@10": 0.9}}}}
    }
    run = write_run(
        tmp_path / HOSTILE.replace("/", "|"),
        about=about,
        scores=scores,
        probe=a_probe(0.1),
        model=HOSTILE,
        objective=HOSTILE,
    )
    (run / "metrics.jsonl").write_text(
        "".join(
            json.dumps(
                {"step": s, "minutes": s, "loss": 1.0, "check": {HOSTILE: 0.5}, "tokens_read": 1}
            )
            + "\n"
            for s in range(3)
        )
    )
    report([run, a_comparison(tmp_path / "runs")], tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert (
        page.text.count(HOSTILE) >= 10 and HOSTILE in page.tables[f"worst {HOSTILE}"]
    )  # shown as it is, and not obeyed
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


def test_the_same_runs_give_the_same_page(tmp_path):
    run = write_run(tmp_path / "a", scores=SCORES, probe=a_probe(0.1))
    report([run], tmp_path / "1.html")
    report([run], tmp_path / "2.html")
    assert (tmp_path / "1.html").read_bytes() == (tmp_path / "2.html").read_bytes()


def test_half_a_surrogate_pair_is_no_error(tmp_path):
    report(
        [write_run(tmp_path / "a", about=ABOUT | {"corpus": "\ud800 here"})], tmp_path / "page.html"
    )
    assert "? here" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_drawings_take_their_colours_from_the_page():
    lines = [Line([(0, 1), (1, 2)], series, band=[(0, 2), (1, 3)]) for series in range(10)]
    drawing = draw(lines, "minutes", "loss", level=1.5)
    assert {f"var(--series-{i})" for i in range(8)} | {"currentColor", "var(--level)"} <= set(
        re.findall(r"var\([^)]*\)|currentColor", drawing)
    )
    assert not re.search(r"#[0-9a-f]{6}[;\"]", drawing) and "http" not in drawing.replace(
        "http://www.w3.org/", ""
    )
    assert drawing == draw(lines, "minutes", "loss", level=1.5)
    assert "<svg" in draw([], "minutes", "loss") and "NaN" not in draw(
        [Line([(0, float("nan")), (1, 2.0)], 0)], "minutes", "loss"
    )


def test_smoothing_is_a_running_mean():
    values = [float(v * v % 17) for v in range(50)]
    for at, (x, mean) in enumerate(smooth(list(enumerate(values)))):
        window = [values[i] for i in range(50) if at - 5 < i <= at]
        assert x == at and mean == pytest.approx(sum(window) / len(window))
    assert smooth([(0.0, 1.0)] * 9) == []


def test_scores_of_several_files_are_merged():
    one, same, other = (
        Scores({"med": {"BM25": SystemScores({"ndcg@10": value})}}) for value in (0.5, 0.5, 0.6)
    )
    assert merge({"a": one, "b": same}) == one.collections
    again = {"BM25": SystemScores({"ndcg@10": 0.5}), "BM25 (b)": SystemScores({"ndcg@10": 0.6})}
    assert merge({"a": one, "b": other}) == {"med": again}


def test_a_label_leads_to_no_folder_outside(tmp_path):
    folder = a_comparison(tmp_path / "runs")
    write_run(tmp_path / "other-0")
    comparison = json.loads((folder / "compare.json").read_text())
    comparison["curves"]["../other, seed 0"] = comparison["curves"]["gated, seed 0"]
    (folder / "compare.json").write_text(json.dumps(comparison))
    assert len(read_results([folder]).runs) == 4


def test_files_are_read_back_as_they_were_written(tmp_path):
    """Written by to_json, through a file, and read by from_json: the same objects again."""
    folder = a_comparison(tmp_path / "runs")
    write_run(tmp_path / "a", scores=SCORES, probe=a_probe(-0.02))
    found = read_results([folder, tmp_path / "a"])
    assert len(found.runs) == 5

    def again(each):
        return type(each).from_json(json.loads(json.dumps(each.to_json())))

    for each in (found.comparisons["runs"], found.probes["a"], *found.runs.values()):
        assert again(each) == each
    scores = found.scores["a"]
    for system, values in again(scores).collections["med"].items():
        before = scores.collections["med"][system]
        assert values == dataclasses.replace(before, margin=pytest.approx(before.margin))
    assert found.comparisons["runs"].to_json() == json.loads((folder / "compare.json").read_text())
    written = found.scores["a"].to_json()["med"]["a"]
    assert written.pop("interval") == pytest.approx([0.65, 0.75])
    assert written == {k: v for k, v in SCORES["med"]["a"].items() if k != "interval"}
    assert found.probes["a"].profiles["exact match"].slope.value == -0.02


def damaged(folder: Path, file: str, content: str) -> Path:
    write_run(folder / "a")
    (folder / "a" / file).write_text(content)
    return folder / "a"


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda p: p / "none", "none does not exist: give folders of revela train"),
        (lambda p: p, "holds no run: give folders of revela train"),
        (lambda p: Path(__file__), "test_report.py is no run: give folders"),
        (lambda p: damaged(p, "run.json", "{"), "run.json cannot be read (JSONDecodeError"),
        (lambda p: damaged(p, "run.json", "[]"), "run.json holds no JSON object"),
        (
            lambda p: damaged(p, "run.json", '{"about": {"bm25": {"title": "high"}}}'),
            "run.json is damaged (about.bm25.title: Input should be a valid number",
        ),
        (lambda p: damaged(p, "run.json", '{"about": 3}'), "run.json is damaged (about: Input"),
        (
            lambda p: damaged(p, "metrics.jsonl", '{"step": 0, "minutes": 0}\n{"step": 1, "min'),
            "metrics.jsonl:2 is no line of a run (JSONDecodeError",
        ),
        (
            lambda p: damaged(p, "metrics.jsonl", '{"minutes": 0}\n'),
            "metrics.jsonl:1 is no line of a run (step: Field required): delete it",
        ),
        (
            lambda p: damaged(p, "metrics.jsonl", '{"step": 1, "minutes": 0, "loss": "low"}\n'),
            "metrics.jsonl:1 is no line of a run (loss: Input should be a valid number",
        ),
        (
            lambda p: damaged(p, "scores.json", '{"med": {"BM25": {"ndcg@10": "good"}}}'),
            "scores.json holds no scores (means.ndcg@10: Input should be a valid number",
        ),
        (
            lambda p: damaged(p, "scores.json", '{"med": {"a": {"map": 1, "interval": 1}}}'),
            "scores.json holds no scores (TypeError",
        ),
        (
            lambda p: damaged(p, "scores.json", '{"med": {"a": {"map": 1, "queries": {"q": {}}}}}'),
            "scores.json holds no scores (ValueError: query q has no ndcg@10): give a file of",
        ),
        (
            lambda p: damaged(p, "scores.json", '{"med": 3}'),
            "scores.json holds no scores (ValueError: no metric of ndcg@10, recall@100",
        ),
        (
            lambda p: damaged(p, "probe.json", '{"profiles": {"exact match": {}}}'),
            "probe.json holds no probe (profiles.exact match.tenths: Field required): give a file",
        ),
        (
            lambda p: damaged(p, "probe.json", json.dumps(a_probe(0.1)).replace("0.5, 1.5", "1.5")),
            "probe.json holds no probe (profiles.exact match: Value error, 9 tenths, but 10 places",
        ),
        (
            lambda p: damaged(p, "compare.json", '{"bm25": {"med": 1}, "curves": {"a": [{}]}}'),
            "compare.json is damaged (curves.a.0.minutes: Field required): run revela compare",
        ),
        (
            lambda p: damaged(
                p,
                "compare.json",
                '{"bm25": {"med": 1}, "curves": {"a": [{"minutes": 1, "tokens_read": 1, "judged": '
                "{}}]}}",
            ),
            "compare.json is damaged (Value error, a has a point without a score on every collec",
        ),
    ],
)
def test_what_is_missing_or_damaged_is_one_sentence_and_leaves_the_page_as_it_was(
    tmp_path, prepare, message
):
    (tmp_path / "there.html").write_text("an older page")
    (tmp_path / "here").mkdir()
    prepared = prepare(tmp_path / "here")
    for out in (tmp_path / "there.html", tmp_path / "new.html"):
        with pytest.raises(RevelaError, match=re.escape(message)) as refused:
            report([prepared], out)
        assert "\n" not in str(refused.value)
    assert (tmp_path / "there.html").read_text() == "an older page" and not (
        tmp_path / "new.html"
    ).exists()


def test_a_run_named_twice_or_a_folder_as_page_is_refused(tmp_path):
    run = write_run(tmp_path / "a")
    with pytest.raises(RevelaError, match="is named twice"):
        report([run, tmp_path / "." / "a"], tmp_path / "page.html")
    with pytest.raises(RevelaError, match="is a folder: give the page a file name"):
        report([run], tmp_path)

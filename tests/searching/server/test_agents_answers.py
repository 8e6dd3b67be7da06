"""What agents are given: no more tokens than they asked for, and equal texts once."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from mcp.server.mcpserver.exceptions import ToolError

from revela.errors import RevelaError
from revela.ranking.bm25 import BM25
from revela.searching.highlight import HighlightTerms
from revela.searching.server import Site
from revela.searching.server.mcp import MAX_TOKENS, Tools
from revela.searching.server.token_budget import count_tokens, shared_out
from revela.searching.snippets import CHARACTERS, snippet
from revela.terminal import counted
from revela.types import Hit, Hits

ENGLISH = "The invoices of a year are kept for ten years, by § 147 of the code. "
SCRIPTS = {
    "English": ENGLISH,
    "Chinese": "发票必须保存十年,从日历年结束时开始计算。",
    "Arabic": "تحفظ الفواتير لمدة عشر سنوات من نهاية السنة. ",
    "code": 'if (x == "a\\tb") {\n\treturn {"k": [1, 2]};\n}\n',
}


class Found:
    """An index whose search finds these texts, best first, each in a document of its own."""

    notice = ""

    def __init__(self, texts, metadata=None):
        self.hits = [
            Hit(f"notes/year {i}/file.md", 1 - i / 1000, "Guide > Taxes", text, i, metadata or {},
                line=5)
            for i, text in enumerate(texts)
        ]  # fmt: skip
        self.known = BM25([*texts, "Other words."], "en")

    def search(self, query, k, **_):
        return Hits(self.hits[:k])

    def file(self, document):
        return None

    def snippets(self, query, hits, characters=CHARACTERS):
        terms = HighlightTerms.of(query, self.known.terms, self.known.idf)
        return [snippet(hit, terms, characters) for hit in hits]

    def chunks(self, name):
        return [hit for hit in self.hits if hit.id == name]


def search(texts, metadata=None, **asked):
    found = Found(texts, metadata)
    answer = Tools(Site("notes"), lambda: found, {}).search("invoices", **asked)
    assert json.loads(answer.content[0].text) == answer.structured_content
    return answer.content[0].text, answer.structured_content


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("max_tokens", [200, MAX_TOKENS])
@pytest.mark.parametrize("words", [3, 120, 4000])
def test_an_answer_fits_its_budget_and_says_what_was_cut(script, max_tokens, words):
    piece = SCRIPTS[script]
    texts = [f"{i}: " + piece * (words * 5 // len(piece) + 1) for i in range(10)]
    text, answer = search(texts, max_tokens=max_tokens)
    assert count_tokens(text) <= max_tokens
    results = answer["results"]
    cut = [result for result in results if result.get("cut")]
    assert results and all(len(result["text"]) > 10 for result in results)
    for result, whole in zip(results, texts, strict=False):
        assert (result["text"] == whole) != (result in cut)
        shown = result["text"].strip("… \n")
        assert "".join(shown.split()) in "".join(whole.split())
    note = answer.get("note", "")
    is_cut = f"{counted(len(cut), 'text is', 'texts are')} cut"
    is_missing = f"{counted(10 - len(results), 'result is', 'results are')} left out"
    assert (is_cut in note) == bool(cut) and (is_missing in note) == (len(results) < 10)
    if cut or len(results) < 10:  # what there is room for is used
        assert count_tokens(text) > 0.9 * max_tokens - 140


def test_an_answer_that_fits_without_snippets_says_that_these_are_left_out():
    texts = [f"{i}: {ENGLISH * 5}" for i in range(10)]
    whole, answer = search(texts, max_tokens=100_000)
    assert all("snippet" in result for result in answer["results"])
    _, bare = search(texts, max_tokens=count_tokens(whole) - 1)
    assert [result["text"] for result in bare["results"]] == texts
    assert not any("snippet" in result for result in bare["results"])
    assert re.fullmatch("To fit .* tokens, snippets are left out.", bare["note"])


@pytest.mark.parametrize("max_tokens", [300, MAX_TOKENS])
def test_a_long_passage_comes_with_the_part_that_answers_and_its_place(max_tokens):
    answer = "\n\nThe camshaft turns at noon.\n\n"
    found = Found(["# Engine\n\n" + ENGLISH * 20 + answer + ENGLISH * 20])
    given = Tools(Site("notes"), lambda: found, {}).search("camshaft", max_tokens=max_tokens)
    (result,) = given.structured_content["results"]
    assert result["title"] == "Guide > Taxes > Engine" and result["line"] == 5 + 4
    part = result["text"] if max_tokens == 300 else result["snippet"]
    assert answer.strip() in part and len(part) < 550
    assert ("snippet" in result) != result.get("cut", False)


def test_ten_passages_of_prose_are_given_whole_by_default():
    _, answer = search([f"{i}: {ENGLISH * 9}" for i in range(10)])
    assert len(answer["results"]) == 10 and "note" not in answer
    assert {len(result["text"].split()) for result in answer["results"]} == {145}


def test_a_long_value_of_metadata_leaves_room_for_the_text():
    text, answer = search([ENGLISH] * 2, {"abstract": "long " * 5000}, max_tokens=500)
    assert count_tokens(text) <= 500 and answer["results"][0]["text"] == ENGLISH


def test_equal_texts_are_given_once_and_others_fill_their_place():
    licence = "Permission is hereby granted,\nfree of charge."
    texts = [licence, "Another text.", *[licence.replace("\n", " ")] * 8, "A third.", ""]
    _, answer = search(texts, k=4)
    assert [result["text"] for result in answer["results"]] == [licence, "Another text."]
    assert answer["results"][0]["copies"] == [f"notes/year {i}/file.md" for i in range(2, 7)]
    _, answer = search(texts, k=6)
    assert [result["text"] for result in answer["results"]][2:] == ["A third.", ""]


def test_short_texts_leave_their_share_to_the_long_ones():
    assert shared_out(["ab", "c" * 900, "d" * 900], 101) == [2, 150, 150]
    assert shared_out(["发" * 90, "d" * 90], 60) == [22, 90]
    assert shared_out([], 100) == []


def test_an_agent_reads_whether_the_first_result_answers():
    found = Found([ENGLISH])
    found.hits = [replace(found.hits[0], confidence=0.01)]
    answer = Tools(Site("notes"), lambda: found, {}).search("who painted the ceiling")
    assert answer.structured_content["answer"] == "probably no answer in these documents"


def test_an_error_of_one_call_ends_with_that_call():
    broken, found = [RevelaError("notes is damaged")], Found([ENGLISH])

    def index():
        if broken:
            raise broken.pop()
        return found

    tools = Tools(Site("notes"), index, {})
    with pytest.raises(ToolError, match="the index cannot be read: see the server's log"):
        tools.search("invoices")
    assert tools.search("invoices").structured_content["results"][0]["text"] == ENGLISH

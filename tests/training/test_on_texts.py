"""``revela.train``: texts, documents and datasets train as files do; its result and messages."""

from __future__ import annotations

import logging
import signal

import datasets
import pytest

import revela
from conftest import TINY, make_documents, make_rows
from revela import Retriever, RevelaError
from revela.training.step import Progress
from tests.collection_folder import write_lines

TEXTS = [row["text"] for row in make_rows(80)]
TITLES = [row["title"] for row in make_rows(80)]
DATASET = datasets.Dataset.from_dict({"body": TEXTS, "name": TITLES})


@pytest.fixture
def run(tiny_lm_folder, tmp_path):
    models = dict.fromkeys(("model", "lm"), str(tiny_lm_folder))

    def train(corpus, out="out", **more):
        settings = TINY | models | dict(held_out=0.4, max_steps=3) | more
        return revela.train(corpus, tmp_path / out, **settings)

    return train


def losses(result):
    return [(row.step, row.loss) for row in result.curve if row.loss is not None]


def test_texts_documents_and_datasets_train_as_files_do(run, tmp_path):
    file = run(str(write_lines(tmp_path / "a.jsonl", make_rows(80))), "file")
    untitled = run([write_lines(tmp_path / "b.jsonl", [{"text": t} for t in TEXTS])], "untitled")
    named = dict(text_field="body", title_field="name")
    for result, like in (
        (run(iter(make_documents(80)), "documents"), file),
        (run(DATASET, "dataset", **named), file),
        (run(DATASET.to_iterable_dataset(), "stream", **named), file),
        (run([*TEXTS, TEXTS[1]], "texts"), untitled),
    ):
        assert losses(result) == losses(like) and len(losses(like)) == 3
        assert result.scores == like.scores and result.tokens == like.tokens
    assert "title" in file.scores["saved"] and "title" not in untitled.scores["saved"]
    card = (tmp_path / "texts" / "README.md").read_text()
    assert "texts (48 documents), 3 steps in" in card


def test_the_result_says_what_happened_and_a_stopped_run_goes_on(run, tmp_path):
    result = run(make_documents(80), keep="last")
    rows = ["BM25", "untrained", "start", "last step", "saved"]
    assert [*result.scores] == rows and result.kept == 3
    first, *table, last = repr(result).splitlines()
    assert first == result.summary and first.endswith(" in the saved state (after 3 steps)")
    assert [line.split("  ")[0] for line in table] == rows
    assert last.startswith("3 steps in") and f"saved to {tmp_path / 'out'}" in last
    assert Retriever(result.path).encode_queries(TEXTS[:2]).shape[0] == 2

    advance = Progress.advance
    with pytest.MonkeyPatch.context() as patch:
        stop = lambda self: (signal.raise_signal(signal.SIGINT), advance(self))  # noqa: E731
        patch.setattr(Progress, "advance", stop)
        stopped = run(TEXTS, "stopped", held_out=0)
    said = "there was no label-free check: the last state was saved unchecked"
    assert stopped.summary == f"stopped by SIGINT after 1 step, continue with --resume; {said}"
    with pytest.raises(RevelaError, match="was started on another corpus"):
        run(TEXTS[1:], "stopped", resume=True, held_out=0)
    resumed, whole = run(TEXTS, "stopped", resume=True, held_out=0), run(TEXTS, held_out=0, out="w")
    assert losses(resumed) == losses(whole) and resumed.summary == said == whole.summary


def test_messages_are_printed_unless_the_program_takes_them(run, capsys, monkeypatch):
    log, taken = logging.getLogger("revela"), logging.Handler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's
    run(TEXTS, "shown")
    assert "held out 32 documents" in capsys.readouterr().out and not log.hasHandlers()
    monkeypatch.setattr(log, "handlers", [taken])
    run(TEXTS, "taken")
    assert "held out" not in capsys.readouterr().out


WITHOUT_TEXT = [
    ([], "corpus is empty: give texts, documents or paths"),
    (["", "a b"], "no document found in texts: skipped 2: shorter than a sentence"),
    ([__file__, "a text"], "is a path, but strings in a list are texts: give a Path"),
    (DATASET, r'dataset: no column "text"; .* \(has body, name\)'),
    (datasets.DatasetDict(train=DATASET, test=DATASET), "has the splits train, test: give one"),
]


@pytest.mark.parametrize(("corpus", "sentence"), WITHOUT_TEXT)
def test_what_holds_no_text_is_one_sentence(run, tmp_path, corpus, sentence):
    with pytest.raises(RevelaError, match=sentence):
        run(corpus)
    assert not (tmp_path / "out").exists()

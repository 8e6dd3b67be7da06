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


@pytest.fixture
def settings(tiny_lm_folder):
    models = dict.fromkeys(("model", "lm"), str(tiny_lm_folder))
    return TINY | models | dict(held_out=0.4, max_steps=3)


def losses(result):
    return [(row.step, row.loss) for row in result.curve if row.loss is not None]


def test_texts_documents_and_datasets_train_as_files_do(settings, tmp_path):
    rows = [*make_rows(80), make_rows(1)[0]]  # one of them twice
    file = write_lines(tmp_path / "corpus.jsonl", rows)
    untitled = write_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    columns = {"body": [row["text"] for row in rows], "heading": [row["title"] for row in rows]}
    dataset, named = datasets.Dataset.from_dict(columns), dict(text_field="body")
    named["title_field"] = "heading"
    runs = {
        "file": revela.train(str(file), tmp_path / "file", **settings),
        "documents": revela.train(iter(make_documents(80)), tmp_path / "documents", **settings),
        "dataset": revela.train(dataset, tmp_path / "dataset", **settings, **named),
        "stream": revela.train(
            dataset.to_iterable_dataset(), tmp_path / "stream", **settings, **named
        ),
        "untitled": revela.train([untitled], tmp_path / "untitled", **settings),
        "texts": revela.train([*TEXTS, TEXTS[1]], tmp_path / "texts", **settings),
    }
    for name, run in runs.items():
        like = runs["untitled" if name == "texts" else name if name == "untitled" else "file"]
        assert losses(run) == losses(like) and len(losses(run)) == 3, name
        assert run.scores == like.scores and run.tokens == like.tokens, name
    assert "title" in runs["file"].scores["saved"] and "title" not in runs["texts"].scores["saved"]
    card = (tmp_path / "texts" / "README.md").read_text()
    assert "texts (48 documents), 3 steps in" in card


def test_the_result_says_what_happened(settings, tmp_path, monkeypatch):
    settings |= dict(keep="last", log_every=5)
    result = revela.train(make_documents(80), tmp_path / "out", **settings)
    assert [*result.scores] == ["BM25", "untrained", "start", "last step", "saved"]
    assert result.scores["saved"] == result.scores["last step"] and result.kept == 3
    assert [step for step, _ in losses(result)] == [3]
    said = repr(result).splitlines()
    assert said[0] == result.summary and said[0].endswith(" after 3 steps, which was saved")
    assert [line.split("  ")[0] for line in said[1:-1]] == [*result.scores]
    model = settings["model"]
    assert "3 steps in" in said[-1] and f"(model {model}, lm {model}); saved to" in said[-1]
    assert Retriever(result.path).encode_queries(TEXTS[:2]).shape[0] == 2

    advance = Progress.advance
    monkeypatch.setattr(
        Progress, "advance", lambda self: (signal.raise_signal(signal.SIGINT), advance(self))
    )
    settings |= dict(held_out=0)
    stopped = revela.train(TEXTS, tmp_path / "stopped", **settings)
    assert stopped.signal == signal.SIGINT and stopped.summary == (
        "stopped by SIGINT after 1 step, continue with --resume; there was no label-free check: "
        "the last state was saved unchecked"
    )
    with pytest.raises(RevelaError, match="was begun on another corpus"):
        revela.train(TEXTS[1:], tmp_path / "stopped", resume=True, **settings)
    monkeypatch.undo()
    whole = revela.train(TEXTS, tmp_path / "whole", **settings | dict(log_every=1))
    resumed = revela.train(TEXTS, tmp_path / "stopped", resume=True, **settings)
    (one, *others), (first, rest) = map(losses, (whole, resumed))
    assert first == one and rest == (3, pytest.approx((others[0][1] + others[1][1]) / 2, rel=1e-5))


def test_messages_are_printed_unless_the_program_takes_them(settings, tmp_path, capsys):
    root, log = logging.getLogger(), logging.getLogger("revela")
    handlers, root.handlers = root.handlers, []  # pytest's
    try:
        assert not log.hasHandlers()
        revela.train(TEXTS, tmp_path / "shown", **settings)
        said = capsys.readouterr().out
        assert "read 80 documents" in said and "held out 32 documents" in said
        assert not log.hasHandlers() and log.level == logging.NOTSET
        taken: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: taken.append(record.getMessage())
        root.handlers = [handler]
        log.setLevel("INFO")
        revela.train(TEXTS, tmp_path / "taken", **settings)
        assert "held out" not in capsys.readouterr().out and "held out 32" in "\n".join(taken)
    finally:
        root.handlers = handlers
        log.setLevel(logging.NOTSET)


DATASET = datasets.Dataset.from_dict({"body": TEXTS, "name": TEXTS})


@pytest.mark.parametrize(
    ("corpus", "sentence"),
    [
        ([], "corpus is empty: give texts, documents or paths"),
        (["", "a b"], "no document found in texts: skipped 2: shorter than a sentence"),
        ([__file__, "a text"], "is a path, and in a list strings are texts: give a Path"),
        (["hub:owner/name"], "is a path, and in a list strings are texts: give a Path"),
        (["a text", 7], r"corpus\[1\] is 7, not a string"),
        (DATASET, r'dataset: no column "text"; .* \(has body, name\)'),
        (datasets.DatasetDict(train=DATASET, test=DATASET), "has the splits train, test: give one"),
        (DATASET.to_pandas(), "corpus must be a list, and a DataFrame is given"),
    ],
)
def test_what_holds_no_text_is_one_sentence(settings, tmp_path, corpus, sentence):
    with pytest.raises(RevelaError, match=sentence) as error:
        revela.train(corpus, tmp_path / "out", **settings)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()

"""The model card names no folder of the machine that it was written on."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from revela.training.retriever.card import Card, without_folders

HOME = str(Path.home())


def test_a_card_says_what_a_retriever_learned_from_without_paths():
    corpus = "/home/bob/my docs/invoices, /mnt/secret/wiki"
    command = f"revela train '/home/bob/my docs/invoices' --out {HOME}/runs/my-retriever"
    settings = {"model": "/mnt/secret/models/smollm2", "lm": "owner/name"}
    scores = {"BM25": {"title": 0.9}, "after": {"title": 0.81234, "title + BM25": 0.95}}
    made = dict(command=command, settings=settings, scores=scores, minutes=1.0, steps=3, slots=2)
    text = Card("my-retriever", "{model} learned.", corpus, 3, **made).text()
    data = ModelCard(text).data
    assert data.library_name == "sentence-transformers" and "revela" in data.tags
    assert "# my-retriever\n" in text and 'SentenceTransformer("my-retriever")' in text
    assert "| after | 0.812 | 0.950 |" in text and "2 documents of a corpus" in text
    assert "revela train invoices --out my-retriever" in text and "\nsmollm2 learned." in text
    assert "model = 'smollm2'\nlm = 'owner/name'" in text
    assert "Trained on invoices, wiki (3 documents), 3 steps in 60.0 seconds:" in text
    assert not [path for path in ("/home/bob", "/mnt/secret", f"{HOME}/") if path in text]


PATHS = [
    ("/a/b c/d.txt, /a/b/", "d.txt, b"),
    ("--out=/tmp/x", "--out=x"),
    ("../../bob/y", "y"),
    (f"{HOME}/runs/a", "a"),
    (__file__, "test_card.py"),
    ("https://host/a/b", None),
    ("hub:owner/name, owner/name@v1", None),
    ("and/or 1/2", None),
    ("a long text " * 99, None),
]


@pytest.mark.parametrize(("text", "left"), PATHS)
def test_paths_are_shortened(text, left):
    assert without_folders(text) == (text if left is None else left)

"""The README's table: what an index finds is scored, by one command that resumes."""

from __future__ import annotations

import json
import sys

from conftest import make_rows
from research.benchmarks import served
from revela import Document, Retriever
from revela.evaluation.metrics import mean_scores, per_query
from tests.collection_folder import write_collection

ROWS = make_rows(24, sentences=40)  # of some three chunks each
ASKED = {  # by collection: queries, and what is relevant to them
    "mine": (
        {f"q{i}": " ".join(ROWS[i]["text"].split()[-3:]) for i in range(12)},
        {f"q{i}": {f"d{i}": 1, f"d{i + 6}": 2} for i in range(12)},
    ),
    "scifact": (  # queries that are documents, too
        {f"d{i}": ROWS[i]["text"] for i in range(12)},
        {f"d{i}": {f"d{i + 12}": 1, f"d{(i + 3) % 12}": 2} for i in range(12)},
    ),
}


def test_the_table_is_what_an_index_finds(saved_retriever, tmp_path, monkeypatch, capsys):
    for name, (queries, qrels) in ASKED.items():
        judged = {(q, d): grade for q, found in qrels.items() for d, grade in found.items()}
        write_collection(tmp_path / "data" / name, ROWS, queries, judged)
    flags = ["--data", tmp_path / "data", "--model", saved_retriever, "--out", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", ["served", *map(str, flags)])

    served.main()
    printed = capsys.readouterr().out
    documents = [Document(row["_id"], row["text"], row["title"]) for row in ROWS]
    index = Retriever(saved_retriever).index(documents, tmp_path / "other")
    assert len(index) > 2 * len(documents)
    rows = {}
    for name, (queries, qrels) in ASKED.items():
        rows[name] = []
        for settings in served.WAYS.values():
            run = {}
            for query, text in queries.items():
                found = [hit.id for hit in index.search(text, len(ROWS), **settings)]
                found = [document for document in found if document != query]
                run[query] = {document: 1 / place for place, document in enumerate(found[:10], 1)}
            rows[name].append(mean_scores(per_query(qrels, run))["ndcg@10"])
        assert len(set(rows[name])) > 1
    mean = [sum(pair) / 2 for pair in zip(*rows.values(), strict=True)]
    titles = {"mine": rows["mine"], r"scifact\*\*": rows["scifact"], "mean of 2": mean}
    expected = [
        f"| {title} | {' | '.join(f'{score:.3f}' for score in scores)} |"
        for title, scores in titles.items()
    ]
    assert printed.splitlines()[2:5] == expected

    monkeypatch.setattr(sys, "argv", ["served", *map(str, flags), "--queries", "2"])
    served.main()
    few = capsys.readouterr().out.splitlines()[2]
    assert few.startswith("| mine |") and few != expected[0]  # of the first query and the last
    monkeypatch.setattr(sys, "argv", ["served", *map(str, flags)])

    mine, other = sorted((tmp_path / "out").rglob("scores-0.json"))
    mine.unlink()
    other.write_text(json.dumps(dict.fromkeys(served.WAYS, 0.5)))
    monkeypatch.setattr(served, "make_index", None)  # its index is there
    served.main()
    again = capsys.readouterr().out.splitlines()
    assert again[2] == expected[0]
    assert again[3] == r"| scifact\*\* " + "| 0.500 " * len(served.WAYS) + "|"

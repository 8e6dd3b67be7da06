"""Mail: what is no mail keeps no other message out."""

from __future__ import annotations

from revela.corpus.load import read_corpus

MESSAGE = "From a@example.org Mon\nFrom: Ann\nSubject: Bees\n\nThey dance at noon.\n\n"


def test_a_broken_message_costs_no_other(tmp_path):
    (tmp_path / "a.mbox").write_text(f"{MESSAGE}From nobody\n\nNo header.\n\n{MESSAGE}")
    documents, report = read_corpus([tmp_path], distinct=False)
    assert [(d.id, d.title) for d in documents] == [("a.mbox:1", "Bees"), ("a.mbox:3", "Bees")]
    assert report.examples == {"no mail": ["a.mbox:2"]}

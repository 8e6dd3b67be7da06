"""Mail: what is no mail keeps no other message out."""

from __future__ import annotations

from revela.corpus.load import read_corpus

MESSAGE = "From a@example.org Mon\nFrom: Ann\nSubject: Bees\n\nThey dance at noon.\n\n"


def test_a_broken_message_costs_no_other(tmp_path):
    (tmp_path / "a.mbox").write_text(f"{MESSAGE}From nobody\n\nNo header.\n\n{MESSAGE}")
    documents, report = read_corpus([tmp_path], distinct=False)
    assert [(d.id, d.title) for d in documents] == [("a.mbox:1", "Bees"), ("a.mbox:3", "Bees")]
    assert report.examples == {"no mail": ["a.mbox:2"]}


FORWARDED = """From: Ann
Subject: Fwd
Content-Type: multipart/mixed; boundary=A

--A
Content-Type: text/plain

See below.
--A
Content-Type: message/rfc822

From: Bo
Subject: Parking
Content-Type: multipart/mixed; boundary=B

--B
Content-Type: text/plain; charset=utf-8
Content-Transfer-Encoding: quoted-printable

Park at the m=C3=BChle.
--B
Content-Type: text/plain
Content-Disposition: attachment; filename=notes.txt

The roof leaks.
--B--
--A--
"""
SAVED = """From: <Saved by Blink>
Subject: Feeding
Content-Type: multipart/related; type="text/html"; boundary=A

--A
Content-Type: text/html
Content-Transfer-Encoding: quoted-printable

<nav><a href=3D"/">Home</a></nav><p>Bees need sugar.</p>
--A
Content-Type: image/png
Content-Transfer-Encoding: base64

iVBORw0KGgo=
--A--
"""


def test_attached_mail_and_text_are_read(tmp_path):
    (tmp_path / "a.eml").write_text(FORWARDED)
    (document,) = read_corpus([tmp_path])[0]
    head, *parts = document.text.split("\n\n")
    assert head == "From: Ann\nAttachments: notes.txt"
    inner = ["Subject: Parking\nFrom: Bo\nAttachments: notes.txt", "Park at the mühle."]
    assert parts == ["See below.", *inner, "The roof leaks."]


def test_a_page_that_a_browser_saved_is_read(tmp_path):
    (tmp_path / "a.mhtml").write_text(SAVED)
    (document,) = read_corpus([tmp_path])[0]
    assert document.title == "Feeding" and "Bees need sugar." in document.text
    assert "iVBOR" not in document.text and "=3D" not in document.text

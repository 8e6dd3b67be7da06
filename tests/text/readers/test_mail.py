"""Mail: what is no mail keeps no other message out."""

from __future__ import annotations

import pytest

MESSAGE = "From a@example.org Mon\nFrom: Ann\nSubject: Bees\n\nThey dance at noon.\n\n"


def test_a_broken_message_costs_no_other(reads):
    box = f"{MESSAGE}From nobody\n\nNo header.\n\n{MESSAGE}"
    documents, report = reads({"a.mbox": box}, distinct=False)
    assert [(d.id, d.title) for d in documents] == [("a.mbox:1", "Bees"), ("a.mbox:3", "Bees")]
    assert report.examples == {"not mail": ["a.mbox:2"]}


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


def test_attached_mail_and_text_are_read(reads):
    ((document,), _) = reads({"a.eml": FORWARDED})
    head, *parts = document.text.split("\n\n")
    assert head == "From: Ann\nAttachments: notes.txt"
    inner = ["Subject: Parking\nFrom: Bo\nAttachments: notes.txt", "Park at the mühle."]
    assert parts == ["See below.", *inner, "The roof leaks."]


def test_a_page_that_a_browser_saved_is_read(reads):
    ((document,), _) = reads({"a.mhtml": SAVED})
    assert document.title == "Feeding" and "Bees need sugar." in document.text
    assert "iVBOR" not in document.text and "=3D" not in document.text


def in_parts(kind, *parts):
    """A part of several, each given as its headers and its text."""
    joined = "".join(f"--{kind}\n{part}\n" for part in parts)
    return f"Content-Type: multipart/{kind}; boundary={kind}\n\n{joined}--{kind}--\n"


PLAIN, PAGE = "Content-Type: text/plain\n\n", "Content-Type: text/html\n\n"
NOTES = "Content-Type: text/plain\nContent-Disposition: inline; filename=notes.txt\n\nThe roof."
PICTURE = "Content-Type: image/png\nContent-Disposition: inline; filename=a.png\n\niVBORw0KGgo="
BOTH = in_parts("alternative", f"{PLAIN}They dance.", f"{PAGE}<p>They fly.</p>")
LINKED = in_parts("related", f"{PAGE}<p>They fly.</p>", PICTURE, "Content-Type: text/css\n\na {}")
INNER = f"From: Bo\nSubject: Hay\n{PLAIN}Under the oak."
PARTS = [
    (in_parts("mixed", f"{PLAIN}Above it.", PICTURE, f"{PLAIN}Below it."), "Above it.|Below it."),
    (in_parts("mixed", f"{PAGE}<p>Above it.</p>", PICTURE, NOTES), "Above it.|The roof."),
    (in_parts("mixed", BOTH, f"{PLAIN}The list."), "They dance.|The list."),
    (LINKED, "They fly."),
    (in_parts("alternative", f"{PLAIN}They dance.", LINKED), "They dance."),
    (in_parts("alternative", in_parts("mixed", LINKED, f"{PAGE}<p>They hum.</p>")),
     "They fly.|They hum."),
    (in_parts("mixed", f"Content-Type: message/rfc822\n\n{INNER}"),
     "Subject: Hay\nFrom: Bo|Under the oak."),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "expected"), PARTS)
def test_every_part_is_read_once_and_of_alternatives_one(reads, parts, expected):
    ((document,), _) = reads({"a.eml": f"From: Ann\nSubject: Bees\n{parts}"}, min_words=1)
    assert document.text.split("\n\n") == ["From: Ann", *expected.split("|")]


DAMAGED = {
    "undefined": "Content-Type: text/plain; charset=undefined\n\nBread is baked \xe9.",
    "punycode": "Content-Type: text/plain; charset=punycode\n\nBread is baked \xe9.",
    "idna": "Content-Type: text/plain; charset=idna\n\nBread is baked \xe9.",
    "a NUL": "Content-Type: text/plain; charset=a\0b\n\nBread is baked \xe9.",
    "a name": "Content-Disposition: attachment; filename*=undefined''%ff\n\nBread is baked.",
    "depth": "".join(
        f'Content-Type: multipart/mixed; boundary="b{i}"\n\n--b{i}\n' for i in range(2000)
    ),
    "messages": "Content-Type: message/rfc822\n\n" * 2000,
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_message_is_read_or_named_and_costs_no_other(reads, kind):
    bad = f"From b@example.org Mon\nSubject: Bread\n{DAMAGED[kind]}\n\n"
    box = f"{MESSAGE}{bad}{MESSAGE * 2}".encode("latin-1")
    documents, report = reads({"a.mbox": box}, distinct=False)
    whole = [d.id for d in documents if d.title == "Bees"]
    assert whole == ["a.mbox:1", "a.mbox:3", "a.mbox:4"]
    if len(documents) == 4:
        assert documents[1].text.endswith("Bread is baked \xe9.")
    else:
        (place,) = report.examples["damaged mail"]
        assert place.startswith("a.mbox:2: ") and report.bad == 1


@pytest.mark.parametrize("codec", ["utf-8-sig", "utf-16", "utf-16-be"])
@pytest.mark.parametrize("charset", ["utf-8", "iso-8859-1", "utf-16", "us-ascii"])
def test_mail_with_a_byte_order_mark_is_mail(reads, codec, charset):
    mark = "\ufeff" if codec.endswith("be") else ""
    plain = f"Content-Type: text/plain; charset={charset}\n\nThey cross the mühle 蜜蜂."
    message = f"From: Ann\nSubject: Bees\n{plain}\n"
    box = f"{mark}From a@example.org Mon\n{message}\nFrom b@example.org Mon\n{message}"
    files = {"a.eml": (mark + message).encode(codec), "b.mbox": box.encode(codec)}
    documents, report = reads(files, distinct=False)
    assert [d.id for d in documents] == ["a.eml", "b.mbox:1", "b.mbox:2"] and not report.skipped
    assert {d.title for d in documents} == {"Bees"}
    assert {d.text.strip() for d in documents} == {"From: Ann\n\nThey cross the mühle 蜜蜂."}


CHARSETS = [
    ("iso-8859-1", "Käse von der Mühle"),
    ("iso-2022-jp", "蜜蜂は花の間で踊る"),
    ("utf-7", "蜜蜂在花丛之间跳舞"),
    ("gb18030", "蜜蜂在花丛之间跳舞"),
]


@pytest.mark.parametrize(("charset", "text"), CHARSETS)
def test_a_declared_charset_is_used_for_what_is_not_utf8(reads, charset, text):
    head = f"Subject: x\nContent-Type: text/plain; charset={charset}\n\n"
    ((document,), _) = reads({"a.eml": head.encode() + text.encode(charset)}, min_words=1)
    assert document.text == text

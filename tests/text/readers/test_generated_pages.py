"""Pages of documentation as their generators write them, and other files that are read in a way of
their own: sentences that their chunks have to hold, and boilerplate that they must not.
"""

from __future__ import annotations

import pytest

from revela.searching.manifest import Indexing
from revela.text.chunk import chunk
from revela.text.load import read_corpus

WORDS = Indexing().chunk_words
MANUAL = """<!DOCTYPE html><html><head><meta charset="utf-8"><title>hive-list</title>
<style>body > div { color: #222 }</style></head><body><div id="rainbar"></div>
<section id="content"><header class="title"><h1>hive-list</h1></header>
<section id="table_of_contents"><div id="_table_of_contents"><ul>
<li><a href="#synopsis">Synopsis of all</a></li><li><a href="#config">Configured</a></li></ul>
</div></section><h3 id="config">Configuration</h3>
<ul><li>Default: the hive of the current folder, if any</li>
<li>Type: null or <a href="/string">a string that names one hive</a></li></ul>
<p>Lists what a hive holds.<ul><li>Frames are listed from left to right
<ul><li>Empty ones come last of all.</li></ul></li></ul></section></body></html>"""
TEXINFO = """<html><head><title>Combs (Bee Manual)</title></head><body lang="en">
<a name="Combs"></a><div class="header"><p>Next: <a href="Honey.html" rel="next">Honey</a>, Up:
<a href="index.html" rel="up">Top</a></p></div><hr><h3 class="section">2.1 Combs</h3>
<a id="index-comb"></a><p>A comb has two layers of cells.</p>
<ul class="section-toc"><li><a href="A.html">Where bees build</a></li>
<li><a href="B.html">Why six sides</a></li></ul>
<dl><dt><a name="i1"></a><code>--width</code></dt><dd><p>The width of a cell in millimetres.</p>
<ul><li>Workers take five, and drones take seven.</li></ul></dd>
<dt><code>--tilt</code><dd>Cells tilt upwards so that nothing runs out.</dl></body></html>"""
PANDOC = """<?xml version="1.0" encoding="UTF-8"?>
<html xmlns="http://www.w3.org/1999/xhtml"><head><title>Swarms</title><script src="m.js"/></head>
<body><header id="title-block-header"><h1 class="title">Swarms</h1></header>
<nav id="TOC" role="doc-toc"><ul><li><a href="#when">When they leave the hive</a></li></ul></nav>
<section id="when" class="level2"><h2>When</h2><p>A swarm leaves at noon.<a id="fn1"/></p>
<ul><li><p>Scouts search for a hollow tree.</p></li></ul>
<ol type="1"><li>The queen flies with them.</li></ol></section></body></html>"""
JAVADOC = """<!DOCTYPE html><html><head><title>Hive</title></head><body class="class-declaration">
<div class="flex-box"><header role="banner"><nav role="navigation"><ul class="nav-list">
<li><a href="/all">All classes and packages</a></li></ul></nav></header><div class="flex-content">
<main role="main"><h1 class="title">Class Hive</h1><section class="details"><ul class="blockList">
<li class="blockList"><h3>open</h3><div class="block">Opens the lid without smoke.</div>
<dl class="notes"><dt>Parameters:</dt><dd><code>slowly</code> - whether it takes a minute</dd>
<dt>Throws:</dt><dd><code><a href="/S">StingException</a></code> - if a guard is awake</dd></dl>
</li></ul></section></main></div></div></body></html>"""
SPHINX = """<!DOCTYPE html><html><head><title>Feeding &#8212; Bees 1.0</title></head><body>
<div class="document"><div class="documentwrapper"><div class="bodywrapper">
<div class="body" role="main"><section id="feeding"><h1>Feeding<a class="headerlink"
href="#feeding">¶</a></h1><p>Feed them sugar in autumn.</p><dl class="py function"><dt>feed(n)</dt>
<dd><p>Give <em>n</em> litres at once.</p></dd></dl><ul class="simple"><li><p>Changed in 1.0:
<a href="/1">it takes litres where it took gallons</a>.</p></li></ul></section></div></div></div>
<div class="sphinxsidebar" role="navigation"><h3>Navigation</h3><ul><li><a href="/i">Index of it
</a></li></ul></div></div></body></html>"""
MAIL = """From: =?utf-8?q?Anna?= <a@example.org>
Subject: =?utf-8?b?S8O2bmlnaW5uZW4=?=
Date: Mon, 4 May 2026 10:00:00 +0200
MIME-Version: 1.0
Content-Type: multipart/mixed; boundary=A

--A
Content-Type: text/html; charset=utf-8

<p>The new queen arrives on <b>Monday</b>.</p>
--A
Content-Type: application/pdf; name=plan.pdf
Content-Disposition: attachment; filename=plan.pdf
Content-Transfer-Encoding: base64

JVBERi0xLjQ=
--A--
"""
BOX = """From a@example.org Mon May  4 10:00:00 2026
Subject: One

The first swarm left in May.

From b@example.org Mon May  4 11:00:00 2026
Subject: Two

The second swarm left at noon.
>From the lake it flew north.
"""
# What has to be found in a file's chunks, and what must not.
EXPECTED: dict[str, tuple[list[str], list[str]]] = {
    "manual.html": (
        [
            "Default: the hive of the current folder, if any",
            "Type: null or a string that names one hive",
            "Frames are listed from left to right • Empty ones come last of all.",
        ],
        ["Synopsis of all", "color"],
    ),
    "texinfo.html": (
        [
            *("A comb has two layers of cells.", "--width The width of a cell in millimetres."),
            "Workers take five, and drones take seven.",
            "--tilt Cells tilt upwards so that nothing runs out.",
        ],
        ["Why six sides"],
    ),
    "pandoc.xhtml": (
        [
            *("A swarm leaves at noon.", "Scouts search for a hollow tree."),
            "The queen flies with them.",
        ],
        ["When they leave the hive"],
    ),
    "javadoc.html": (
        [
            *("Opens the lid without smoke.", "slowly - whether it takes a minute"),
            "StingException - if a guard is awake",
        ],
        ["All classes"],
    ),
    "sphinx.htm": (
        [
            *("Feed them sugar in autumn.", "feed(n) Give n litres at once."),
            "Changed in 1.0: it takes litres where it took gallons.",
        ],
        ["Index of it", "¶"],
    ),
    "rest.rst": (["Hives :caption: What stands where", "A stand keeps ants away."], []),
    "notes.org": (["Пчёлы зимуют в клубе."], []),
    "mail.eml": (
        ["From: Anna <a@example.org>", "Attachments: plan.pdf The new queen arrives on Monday."],
        ["<p>", "base64"],
    ),
    "box.mbox": (["The second swarm left at noon.", "From the lake it flew north."], [">From"]),
    "dots.txt": (["Crickets sing in the dark.", "And then it was dawn."], []),
}


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ugly")
    texts = {
        "manual.html": MANUAL,
        "texinfo.html": TEXINFO,
        "pandoc.xhtml": PANDOC,
        "javadoc.html": JAVADOC,
        "sphinx.htm": SPHINX,
        "rest.rst": ".. toctree::\n\nHives\n  :caption: What stands where\n\n"
        "A stand keeps\nants away.\n",
        "notes.org": "#+TITLE: Зима\n* Клуб\nПчёлы зимуют в клубе.",
        "mail.eml": MAIL.replace("\n", "\r\n"),
        "box.mbox": BOX,
        "dots.txt": f"Crickets sing in the dark. {'.' * 32_000}x And then it was dawn.",
    }
    for name, text in texts.items():
        (folder / name).write_bytes(text.encode())
    return read_corpus([folder], distinct=False, min_words=1)[0]


@pytest.mark.parametrize("name", EXPECTED)
def test_sentences_are_found_in_the_chunks(read, name):
    documents = [d for d in read if d.id.split(":")[0] == name]
    found, gone = EXPECTED[name]
    chunks = [" ".join(c.text.split()) for d in documents for c in chunk(d, 0, WORDS)]
    for sentence in found:
        assert any(sentence in text for text in chunks), sentence
    for boilerplate in gone:
        assert not any(boilerplate in text for text in chunks), boilerplate


def test_a_document_has_its_own_title(read):
    titles = {"manual.html": "hive-list", "rest.rst": "", "mail.eml": "Königinnen"}
    titles["notes.org"] = "Зима"
    assert {d.id: d.title for d in read if d.id in titles} == titles


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "cp1250"])
def test_headers_of_mail_may_have_bytes_beyond_ascii(encoding, tmp_path):
    """As old programs write them: neither declared nor encoded."""
    named = {"Subject": "Eine Mühle für größere Körner, März", "From": "Jörg Müller <j@x.de>"}
    head = "".join(f"{key}: {value}\r\n" for key, value in named.items())
    (tmp_path / "a.eml").write_bytes(f"{head}\r\nThe mill is loud.\r\n".encode(encoding))
    (document,) = read_corpus([tmp_path])[0]
    assert document.title == named["Subject"]
    assert document.text == f"From: {named['From']}\n\nThe mill is loud."

"""A hit is opened: its document around the passage, and its file; nothing else of the machine."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from served import build, encoder, index, make_service, running

from revela.searching.server import Access, Site
from revela.searching.server.mcp import Tools
from revela.searching.word_search import Words
from revela.text.load import read_corpus

LONG = "".join(f"Paragraph {i} is about the garden0{i % 9}.\n\n" for i in range(400))
PAGE = "<script>alert(1)</script><p>The castle opens at nine.</p>"


@pytest.fixture
def docs(tmp_path):
    docs = tmp_path / "docs"
    (docs / "a b").mkdir(parents=True)
    (docs / "a b" / "ü#1.md").write_text("# Castle\n\nIt opens at **nine**.\n")
    (docs / "long.txt").write_text(LONG)
    (docs / "page.html").write_text(PAGE)
    (docs / "rows.csv").write_text("id,text\n17,the violin is old\n")
    (docs / "w.pdf").write_bytes(b"%PDF-1.4 no pdf")
    (docs / "secret.bin").write_bytes(b"\0\1")
    (tmp_path / "outside.txt").write_text("secret")
    return docs


@pytest.fixture
def service(make_service, encoder, docs, tmp_path):
    service = make_service(local_only=True)
    service.index = build(tmp_path / "index", [], encoder)
    service.index.sync(docs)
    return service


def test_a_document_is_read_around_a_passage_with_its_words_marked(service, docs, tmp_path):
    with running(service) as server:

        def get(name, **how):
            return httpx.get(f"{server.url}/v1/documents/{name}", params=how)

        found = get("a%20b%2F%C3%BC%231.md", query="when nine").json()
        (passage,) = found["passages"]
        assert passage["text"] == {"text": "It opens at nine.", "marks": [[12, 16]]}
        assert (found["title"], found["chunks"], found["note"]) == ("Castle", 1, None)
        assert found["path"] == str(docs / "a b" / "ü#1.md")
        assert httpx.get(f"{server.url}/{found['file']}").text.startswith("# Castle")
        long = get("long.txt", chunk=20).json()
        assert [one["chunk"] for one in long["passages"]] == [*range(8, 33)] and long["chunks"] > 33
        assert long["passages"][0]["line"] > 1
        assert get("17").json()["path"] == str(docs / "rows.csv")
        for name, how in (("no.md", {}), ("long.txt", {"chunk": 10**6}), ("..%2Foutside.txt", {})):
            answer = get(name, **how)
            assert answer.status_code == 404 and "search again" in answer.json()["error"]["message"]
        (docs / "long.txt").write_text("short")
        assert "has changed since" in get("long.txt").json()["note"]
        (docs / "long.txt").unlink()
        found = get("long.txt").json()
        assert "no longer exists" in found["note"] and found["file"] is None and found["passages"]
        linked = docs / "a b" / "ü#1.md"
        linked.rename(tmp_path / "moved.md")
        linked.symlink_to(tmp_path / "moved.md")
        found = get("a%20b%2F%C3%BC%231.md").json()
        assert found["file"] is None and found["note"] is None, "a link out of the folder"
        service.access = Access()  # of a server for other machines: no place, no file
        found = get("a%20b%2F%C3%BC%231.md").json()
        assert found["path"] is None and found["file"] is None and found["passages"]
        assert httpx.get(f"{server.url}/v1/files/page.html").status_code == 403


def test_paths_that_are_not_utf_8_are_escaped(make_service, encoder, tmp_path):
    docs = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9"))
    docs.mkdir()
    Path(os.fsdecode(bytes(docs) + b"/th\xe9.txt")).write_text("The castle opens at nine.")
    service = make_service(local_only=True)
    service.index = build(tmp_path / "index", [], encoder)
    service.index.sync(docs)
    with running(service) as server:
        (hit,) = httpx.get(f"{server.url}/v1/search", params={"query": "castle"}).json()["data"]
        assert hit["id"] == r"th\xe9.txt" and hit["path"].endswith(r"/caf\xe9/th\xe9.txt")
        address = f"{server.url}/v1/documents/{quote(hit['id'])}"
        found = httpx.get(address).json()
        assert found["note"] is None and found["path"] == hit["path"]
        assert httpx.get(f"{server.url}/{found['file']}").text == "The castle opens at nine."
    for with_files, scheme in ((True, "file:///"), (False, "revela:")):
        tools = Tools(Site(), lambda: service.index, {}, with_files)
        (same,) = tools.search("castle").structured_content["results"]
        assert same.get("path") == (hit["path"] if with_files else None)
        assert same["url"].startswith(scheme)


def test_files_are_never_pages_of_this_origin_and_none_is_read_outside(service, docs, tmp_path):
    with running(service) as server:

        def get(name):
            return httpx.get(f"{server.url}/v1/files/{name}")

        page = get("page.html")
        assert page.text == PAGE and page.headers["content-type"].startswith("text/plain")
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["cross-origin-resource-policy"] == "same-origin"
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert page.headers["content-disposition"].startswith("inline")
        assert get("17").text.startswith("id,text")
        outside = [
            "..%2Foutside.txt",
            "../outside.txt",
            str(tmp_path / "outside.txt"),
            "secret.bin",
        ]
        outside += ["a%20b%2F..%2Fsecret.bin", "w.pdf", "%2Fetc%2Fpasswd", "a%20b", "", "%00"]
        assert {get(name).status_code for name in outside} == {404}
        (docs / "page.html").unlink()
        (docs / "page.html").symlink_to(tmp_path / "outside.txt")
        assert get("page.html").status_code == 404
        url = f"{server.url}/v1/files/rows.csv"
        assert httpx.get(url, headers={"host": "evil.example"}).status_code == 421


def test_a_pdf_is_shown_and_an_archive_is_saved(service, docs, monkeypatch):
    monkeypatch.setattr(service.index, "chunks", lambda _: [1])
    kinds = {
        "a.pdf": ("application/pdf", "inline"),
        "a.docx": ("application/octet-stream", "attachment"),
        "a.py": ("text/plain; charset=utf-8", "inline"),
        "a.svg": ("text/plain; charset=utf-8", "inline"),
        "a.txt": ("text/plain; charset=windows-1252", "inline"),
        "a.txt.gz": ("application/octet-stream", "attachment"),
    }
    with running(service) as server:
        for name, (kind, how) in kinds.items():
            text = "Die Größe der Häuser ist für alle gleich." if name == "a.txt" else "x"
            (docs / name).write_text(text, "cp1252")
            answer = httpx.get(f"{server.url}/v1/files/{name}")
            assert answer.headers["content-type"] == kind, name
            assert answer.headers["content-disposition"].startswith(how), name


def test_a_document_is_read_while_vectors_are_made(service, docs):
    documents, _ = read_corpus([docs / "long.txt", docs / "rows.csv"])
    service.index = Words(documents, 120, [docs])
    with running(service) as server:
        found = httpx.get(
            f"{server.url}/v1/documents/long.txt", params={"query": "garden01"}
        ).json()
        assert found["passages"][0]["text"]["marks"] and found["path"] and found["note"] is None
        assert httpx.get(f"{server.url}/{found['file']}").text == LONG

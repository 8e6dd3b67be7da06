"""Each chunk of a Markdown document has the headings above it as its title."""

from __future__ import annotations

import pytest

from revela.corpus.chunk import chunk
from revela.corpus.headings import titles
from revela.types import Document

TEXT = """Before all headings.

# Guide #

Of the whole. Second sentence here.

```sh
# no heading
```

## Install

Run this now. And then that.

~~~
# nor this
```
# nor this
~~~

### By `pip`

It is quick. It is easy.

## Use

Ask it things. It answers you.

# Why
Because it works."""


def pieces(document, words):
    return [piece.text for piece in chunk(document, 0, words)]


def test_the_path_of_the_headings_above_a_chunk():
    document = Document("docs/a.md", TEXT)
    found = pieces(document, 4)
    above = [
        (text.strip().splitlines()[-1], title)
        for text, title in zip(found, titles(document, found), strict=True)
    ]
    assert above == [
        ("Before all headings.", ""),
        ("# Guide #", ""),
        ("Of the whole.", "Guide"),
        ("Second sentence here.", "Guide"),
        ("# no heading", "Guide"),
        ("## Install", "Guide"),
        ("Run this now.", "Guide > Install"),
        ("And then that.", "Guide > Install"),
        ("# nor this", "Guide > Install"),
        ("# nor this", "Guide > Install"),
        ("### By `pip`", "Guide > Install"),
        ("It is quick.", "Guide > Install > By `pip`"),
        ("It is easy.", "Guide > Install > By `pip`"),
        ("## Use", "Guide"),
        ("Ask it things.", "Guide > Use"),
        ("It answers you.", "Guide > Use"),
        ("# Why", ""),
        ("Because it works.", "Why"),
    ]


@pytest.mark.parametrize("words", [1, 2, 3, 7, 20, 200])
def test_every_chunk_has_a_title_after_the_documents_own(words):
    document = Document("a.markdown.gz", TEXT.replace("\n\n", "\n \n\n\n"), " Name ")
    found = pieces(document, words)
    assert len(titles(document, found)) == len(found)
    assert all(title.startswith("Name") for title in titles(document, found))
    assert "".join("".join(found).split()) == "".join(TEXT.split())


def test_other_formats_have_no_headings():
    document = Document("a.txt", TEXT, "Name")
    assert set(titles(document, pieces(document, 4))) == {"Name"}


def test_a_heading_is_repeated_in_part_only():
    document = Document("a.md", f"# {'longer' * 1000}\n\nThe text of it.")
    assert max(map(len, titles(document, pieces(document, 5)))) == 200


def test_a_line_of_a_megabyte_takes_no_time():
    document = Document("a.md", f"# C#{' ' * 2**20}D\r\n\nThe text of it. It ends.")
    assert titles(document, pieces(document, 4))[-1] == "C#"

"""Each chunk of a Markdown document has the headings above it as its title."""

from __future__ import annotations

import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from revela.text.chunk import chunk
from revela.text.headings import first_heading, sections, titles
from revela.text.sentences import sentences
from revela.text.words import count_words
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


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_underlined_headings(line_end):
    text = """Guide to bees
=====

Of the whole.
A rule follows
---

Use
---

| a | b |
|---|---|

- An item
---

## Why

Because."""
    document = Document("a.md", text.replace("\n", line_end))
    found = pieces(document, 9)
    assert "".join(found) == document.text
    above = dict(zip((piece.split()[-1] for piece in found), titles(document, found), strict=True))
    assert above["Because."] == "Guide to bees" and "Guide to bees > Use" in above.values()
    assert not {"A rule follows", "An item"} & {
        part for t in above.values() for part in t.split(" > ")
    }
    assert first_heading(document.text) == "Guide to bees"


def pieces(document, words):
    return [piece.text for piece in chunk(document, 0, words)]


def test_the_path_of_the_headings_above_a_chunk():
    document = Document("docs/a.md", TEXT)
    found = pieces(document, 4)
    above = [
        (text.strip().splitlines()[-1], title)
        for text, title in zip(found, titles(document, found), strict=True)
    ]
    install = ["Run this now.", "And then that.", "# nor this", "# nor this", "~~~", "### By `pip`"]
    wanted = [
        ("", ["Before all headings.", "# Guide #"]),
        ("Guide", ["Of the whole.", "Second sentence here.", "# no heading", "```", "## Install"]),
        ("Guide > Install", install),
        ("Guide > Install > By `pip`", ["It is quick.", "It is easy."]),
        ("Guide", ["## Use"]),
        ("Guide > Use", ["Ask it things.", "It answers you."]),
        *(("", ["# Why"]), ("Why", ["Because it works."])),
    ]
    assert above == [(line, title) for title, lines in wanted for line in lines]


@pytest.mark.parametrize("words", [1, 2, 3, 7, 20, 200])
def test_every_chunk_has_a_title_after_the_documents_own(words):
    document = Document("a.markdown.gz", TEXT.replace("\n\n", "\n \n\n\n"), " Name ")
    found = pieces(document, words)
    assert len(titles(document, found)) == len(found)
    assert all(title.startswith("Name") for title in titles(document, found))
    assert "".join("".join(found).split()) == "".join(TEXT.split())


LINES = ["# A", "## B", "### C", "## D #", "One two three.", "Four five.\nSix seven."]
LINES += ["A | b |\n" * 9]


@given(st.lists(st.sampled_from(LINES), max_size=25), st.integers(7, 40), st.sampled_from("\n\r"))
def test_the_headings_of_a_title_are_above_all_of_its_chunk(lines, words, end):
    """And a chunk ends with a heading only if no text follows that could be in the chunk too."""
    text = "\n\n".join(lines).replace("\n", "\r\n" if end == "\r" else "\n")
    document = Document("a.md", text)
    # A run of headings that is longer than a chunk is cut as any text.
    assume(all(count_words(section.headings) <= words for section in sections(text)))
    found, above, paths, rest = pieces(document, words), dict[int, str](), list[str](), text
    assert "".join(found) == text
    for line in (line for line in lines if line[0] == "#"):
        level = line.index(" ")
        above = {depth: words for depth, words in above.items() if depth < level}
        above[level] = line.strip("# ")
        paths.append(" > ".join(above.values()))
    for piece, title in zip(found, titles(document, found), strict=True):
        shown = [line for line in piece.splitlines() if line]
        count = sum(line[0] == "#" for line in shown)
        assert all(
            f"{path} > ".startswith(f"{title} > " if title else "") for path in paths[:count]
        )
        paths, rest = paths[count:], rest[len(piece) :]
        if shown[-1][0] == "#" and rest and rest[0] != "#":
            least = count_words(sentences(rest)[0])
            assert count_words(piece) + (4 if least > words else least) > words


def test_short_sections_share_a_chunk_and_a_long_one_begins_its_own():
    text = "# A\n\n## B\n\nIt is.\n\n## C\n\nSo too.\n\n## D\n\n" + "All of these words. " * 5
    assert pieces(Document("a.md", text), 20) == [
        "# A\n\n## B\n\nIt is.\n\n## C\n\nSo too.\n\n",
        "## D\n\n" + "All of these words. " * 4,
        "All of these words. ",
    ]


def test_a_table_below_a_heading_leaves_room_for_it():
    first, second = pieces(Document("a.md", "## Prices\n\n" + "| honey | 12 |\n" * 6), 20)
    assert first == "## Prices\n\n" + "| honey | 12 |\n" * 3 and second == "| honey | 12 |\n" * 3


def test_other_formats_have_no_headings():
    document = Document("a.txt", TEXT, "Name")
    assert set(titles(document, pieces(document, 4))) == {"Name"}


def test_a_heading_is_repeated_in_part_only():
    document = Document("a.md", f"# {'longer' * 1000}\n\nThe text of it.")
    assert max(map(len, titles(document, pieces(document, 5)))) == 200


def test_a_line_with_code_between_fences_begins_no_block():
    assert [s.headings for s in sections("```pip``` does it.\n\n# Use\n")] == ["", "# Use\n"]


def test_a_line_of_a_megabyte_takes_no_time():
    document = Document("a.md", f"# C#{' ' * 2**20}D\r\n\nThe text of it. It ends.")
    begin = time.process_time()
    assert titles(document, pieces(document, 4))[-1] == "C#"
    assert time.process_time() - begin < 5

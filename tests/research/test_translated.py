"""Manual pages and documents of packages in a language: what is read, and what is left out."""

from __future__ import annotations

import gzip

import pytest

from research.benchmarks.translated import manual_page, translated

PAGE = r""".\" made by hand
.de Sp
.if t .sp .5v
..
.TH LS 1 "September 2022"
.SH "BEZEICHNUNG"
ls, dir \- Verzeichnisinhalte
auf\(:ulisten
.SH "\(:UBERSICHT"
\fBls\fP [\fI\,OPTION\/\fP]\&...
.SH BESCHREIBUNG
.PP
Auflistung von Informationen \[u00FC]ber die Dateien; siehe
.BR dircolors (1),
.\" ein Kommentar
.TP 4
.BR \-a ", " \-\-all
Eintr\[:a]ge nicht \*(Aqignorieren\*(Aq, die mit \(Fo.\(Fc beginnen\h'+2n' und so fort.
.IP \(bu 2
Die Reihenfolge ist die des Alphabets.
"""
TEXT = """ÜBERSICHT
ls [OPTION]...

BESCHREIBUNG

Auflistung von Informationen über die Dateien; siehe
dircolors(1),

-a, --all
Einträge nicht 'ignorieren', die mit «.» beginnen und so fort.
•
Die Reihenfolge ist die des Alphabets."""
MDOC = ".Dd May 1\n.Sh NAME\n.Nm cal\n.Nd shows a calendar\n.Sh SYNOPSIS\n.Nm cal\n"


def test_a_page_without_macros():
    title, text = manual_page(PAGE)
    assert title == "Verzeichnisinhalte aufülisten"
    assert text.splitlines() == TEXT.splitlines()
    assert manual_page(MDOC) == ("shows a calendar", "SYNOPSIS\ncal")
    assert manual_page("no page") == ("", "")


@pytest.fixture
def share(tmp_path):
    def write(path, text, encoding="utf-8"):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        data = text.encode(encoding)
        file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)

    write("man/de/man1/ls.1.gz", PAGE)
    (tmp_path / "man/de/man1/dir.1.gz").symlink_to("ls.1.gz")
    write("man/de_AT/man1/ls.1", PAGE)  # the same text
    write("man/de/man1/alt.1", PAGE.replace("Alphabets", "Größe"), "latin-1")
    english = "It prints the time and the date of the file that was changed last, to a terminal."
    write("man/de/man1/new.1", f".SH NAME\nnew \\- a page\n.SH DESCRIPTION\n{english}\n")
    write("man/fr/man1/ls.1", PAGE.replace("Alphabets", "alphabet"))
    write("doc/pack/README.de.gz", "Dieses Paket enthält die Handbücher der Programme.")
    write("doc/pack/lib.devhelp2", "<book/>")
    write("doc/pack/figure.de.svg", "<svg/>")
    page = "<page><title>Bilder ansehen und drehen</title><p>Öffnen Sie das Bild mit der Maus.</p>"
    write("help/de/viewer/index.page", page)
    return tmp_path


def test_what_a_machine_has_in_a_language(share):
    found = {d.id.removeprefix(f"{share}/"): (d.title, d.text) for d in translated("de", share)}
    latin = manual_page(PAGE.replace("Alphabets", "Größe"))
    assert found == {
        "man/de/man1/alt.1": latin,
        "man/de/man1/ls.1.gz": ("Verzeichnisinhalte aufülisten", manual_page(PAGE)[1]),
        "doc/pack/README.de.gz": ("", "Dieses Paket enthält die Handbücher der Programme."),
        "help/de/viewer/index.page": (
            "Bilder ansehen und drehen",
            found["help/de/viewer/index.page"][1],
        ),
    }
    assert "Öffnen Sie das Bild mit der Maus." in found["help/de/viewer/index.page"][1]
    assert translated("xx", share) == []

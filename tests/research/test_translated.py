"""Manual pages and documents of packages in a language: what is read, and what is left out."""

from __future__ import annotations

from research.benchmarks.translated import manual_page

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

r"""Read LaTeX as Markdown: sections become headings, rows of tables lines; formulas are unchanged.

Commands are removed by patterns. pylatexenc 2.11 failed on 6 of 81 manuals and chapters, dropped
listings and the macros of names, and took 6.5 s per megabyte.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

from revela.text.headings import first_heading
from revela.text.readers.common import ReadReport, read_decoded
from revela.text.readers.rows import Fields
from revela.text.readers.table_lines import Merged, sheet_tables
from revela.text.readers.text import plain_title
from revela.types import Document

# An argument in braces, with up to three levels of braces in it and no blank line; and an option.
_CHARACTER = _INNER = r"[^{}\\\n]|\\[\s\S]|\n(?!\s*\n)"
for _ in range(3):
    _INNER = rf"{_CHARACTER}|\{{(?:{_INNER})*+\}}"
_TEXT = rf"\{{((?:{_INNER})*+)\}}"
_ARGUMENT = _TEXT.replace("((?:", "(?:(?:")
_OPTION = r"\[(?:[^\[\]\n\\]|\\.)*+\]"
_ARGUMENTS = rf"(?:{_OPTION}|{_ARGUMENT})*"
# Commands whose arguments are not text, commands for layout, and the meaning of others.
_SETTINGS = """documentclass|usepackage|RequirePackage|PassOptionsToPackage|hypersetup|label|ref
    |eqref|autoref|[cC]ref|pageref|index\w*|glossary|[vh]space|includegraphics|input|include|setlength
    |addtolength|setcounter|addtocounter|(?:this)?pagestyle|bibliographystyle|bibliography
    |newtheorem|(?:re)?newenvironment|newlength|newcounter|pagenumbering|addcontentsline|hyphenation
    |geometry|graphicspath|fontsize|(?:define)?color|rule|DeclareMathOperator|usetikzlibrary|cline
    |cmidrule|addbibresource|usetheme"""
_LAYOUT = """noindent centering raggedright hline toprule midrule bottomrule newpage clearpage
    cleardoublepage maketitle tableofcontents appendix frontmatter mainmatter backmatter par newline
    linebreak pagebreak smallskip medskip bigskip hfill vfill bf it sc tt rm sf em bfseries itshape
    scshape ttfamily rmfamily sffamily tiny scriptsize footnotesize small normalsize large Large
    LARGE huge Huge quad qquad protect relax leavevmode endhead endfirsthead endfoot endlastfoot
    makeatletter makeatother"""
_MEANT = {
    **{"ldots": "…", "dots": "…", "ss": "ß", "ae": "æ", "AE": "Æ", "oe": "œ", "OE": "Œ", "o": "ø"},
    **{"O": "Ø", "aa": "å", "AA": "Å", "l": "ł", "L": "Ł", "S": "§", "P": "¶", "item": "-"},
    **{"textbackslash": "\1", "textasciitilde": "\2", **dict.fromkeys(_LAYOUT.split(), "")},
}
_ACCENTS = dict(zip("`'^\"~=.uvHcdbkr", "\u0300\u0301\u0302\u0308\u0303\u0304\u0307\u0306\u030c"
                    "\u030b\u0327\u0323\u0331\u0328\u030a", strict=True))  # fmt: skip
_SIGNS = {"``": "“", "''": "”", "---": "—", "--": "–", "~": " ", "{": "", "}": ""}
_SIGNS |= {"\1": "\\", "\2": "~", "\3": "{", "\4": "}"}
_GONE = "\5"  # a command that was removed; a line of it alone does not end a paragraph
_PARAGRAPH = re.compile(r"^(?:.+\n)+", re.MULTILINE)
_NUMBERED = re.compile("\6(\\d+)\7")  # the number of a fragment
_LISTING = r"(?:verbatim|Verbatim|lstlisting|minted|alltt|filecontents)\*?"
_FORMULA = r"(?:equation|align|alignat|flalign|gather|multline|eqnarray|displaymath|math)\*?"
_AS_IT_IS = re.compile(
    rf"""\\[\\%$]
    | (?P<comment>%.*\n?)
    | \\begin\{{(?P<listing>{_LISTING})\}}
        (?P<code>(?s:(?!\\begin\{{(?P=listing)).)*?)\\end\{{(?P=listing)\}}
    | \\(?:verb\*?|lstinline)(?P<mark>[^\w\s*{{\[])(?P<verb>.*?)(?P=mark)
    | \\begin\{{(?P<kind>{_FORMULA})\}}(?s:(?!\\begin\{{(?P=kind)).)*?\\end\{{(?P=kind)\}}
    | \\\[(?s:(?!\\\[).)*?\\\] | \\\((?s:(?!\\\().)*?\\\) | \$\$(?s:.*?)\$\$
    | \$(?:[^$\\\n]|\\.|\n(?!\s*\n))+\$""",
    re.VERBOSE,
)
_FRONT = re.compile(rf"\\(title|subtitle|author|institute|date|abstract)\b\s*(?:{_OPTION})?{_TEXT}")
_HEADINGS = {
    **{"part": "#", "chapter": "#", "section": "##", "subsection": "###", "subsubsection": "####"},
    **{"frametitle": "###", "begin{frame}": "###"},
}
_HEADING = re.compile(
    rf"(?P<before>^[ \t]*)?\\(?P<kind>{'|'.join(map(re.escape, _HEADINGS))})\*?"
    rf"(?:{_OPTION})*{_TEXT}(?:\s*{_GONE})*(?P<after>[ \t]*$)?",
    re.MULTILINE,
)
_TABLE = re.compile(
    rf"\\begin\{{(?P<name>tabular[*xy]?|longtable)\}}{_ARGUMENTS}"
    r"(?P<rows>(?s:(?!\\begin\{(?:tabular|longtable)).)*?)\\end\{(?P=name)\}"
)
_ROW_END = re.compile(rf"\\\\\*?(?:{_OPTION})?|\\tabularnewline\b")
_COLUMNS = re.compile(r"\\multicolumn\s*\{([1-9]\d?)\}")


def _accented(found: re.Match[str]) -> str:
    return unicodedata.normalize("NFC", found[3] + _ACCENTS[found[1] or found[2]])


_REMOVED = [
    re.compile(rf"\\(?:(?:re)?new|provide)command\*?\s*\{{?\\\w+\}}?(?:{_OPTION})*\s*{_ARGUMENT}"),
    re.compile(rf"\\[egx]?def\s*\\[A-Za-z@]+[^{{}}\n]*{_ARGUMENT}"),
    re.compile(rf"\\(?:{''.join(_SETTINGS.split())})\*?(?![A-Za-z]){_ARGUMENTS}"),
]
# Patterns and what replaces them, in this order.
_STEPS: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (rf"[ \t]?\\(?:footnote|thanks)(?:{_OPTION})?{_TEXT}", r" (\1)"),
    (rf"\\href\s*\{{([^{{}}]*)\}}\s*{_TEXT}", r"[\2](\1)"),
    (rf"[~ \t]?\\[A-Za-z]*[cC]ite[a-z]*\*?(?:{_OPTION})*\{{([^{{}}\n]*)\}}", r" [\1]"),
    (rf"\\bibitem(?:{_OPTION})?\{{([^{{}}\n]*)\}}", r"[\1]"),
    (r"\\item[ \t]*\[((?:[^\[\]\n]|\[[^\[\]\n]*\])*)\]", r"- \1:"),
    (rf"\\multi(?:row|column)\s*(?:{_OPTION})?{_ARGUMENT}(?:{_OPTION})?{_ARGUMENT}", ""),
    (rf"\\begin\{{(?:minipage|multicols|column|thebibliography)\}}{_ARGUMENTS}", ""),
    (r"\\(?:begin|end)\{[^{}\n]*\}(?:\[(?:[htbpH!]+|[^\]\n]*=[^\]\n]*)\])?", ""),
    (r"\\(?:([`'^\"~=.])|([uvHcdbkr])(?![A-Za-z]))\s*\{?\\?([A-Za-z])\}?", _accented),
    (rf"\\\\\*?(?:{_OPTION})?|\\[ ,;:!]", " "),
    (r"\\[-/]", ""),
    (r"\\\{", "\3"),
    (r"\\\}", "\4"),
    (r"\\([%&#_$])", r"\1"),
    (r"\}[ \t]*\{", "} {"),
    (rf"\\[A-Za-z@]+\*?(?:{_OPTION})*(?=\{{[^}}])", ""),  # the argument stays
    (r"\\([A-Za-z@]+)\*?(?:\{\})?", lambda found: _MEANT.get(found[1], found[1])),
    ("|".join(map(re.escape, _SIGNS)), lambda found: _SIGNS[found[0]]),
]


def read_latex(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read a file as one document, whose lines keep their numbers."""
    title, text = plain_latex(read_decoded(path, name, report).replace("\r\n", "\n"))
    yield Document(name, text, plain_title(title))


def plain_latex(source: str) -> tuple[str, str]:
    r"""Title and text of LaTeX.

    >>> plain_latex(r"\documentclass{book}\title{Bees}\begin{document}They \emph{dance}.")
    ('Bees', '# Bees\nThey dance.')
    """
    kept = _Fragments()
    text = _AS_IT_IS.sub(kept.as_it_is, re.sub("[\1-\7]", "", source))
    head, begin, body = text.partition(r"\begin{document}")
    title = ""
    if begin and r"\documentclass" in head and not _HEADING.search(head):
        named = (found[2] for found in _FRONT.finditer(text) if found[1] == "title")
        title = " ".join(kept.restored(_plain(next(named, ""))).split())
        text = _front(head, kept.restored(head).count("\n")) + body
    for pattern in _REMOVED:
        text = pattern.sub(lambda found: _GONE + "\n" * found[0].count("\n"), text)
    for _ in range(2):  # a table may be in another's cell
        text = _TABLE.sub(kept.as_lines, text)
    text = _plain(_PARAGRAPH.sub(_without_removed, _HEADING.sub(_heading, text)))
    text = kept.restored(text.replace(_GONE, ""))
    return title or first_heading(text), text


class _Fragments:
    """Parts of a text that no pattern may change, and that numbers stand for meanwhile."""

    def __init__(self) -> None:
        self._texts = list[str]()

    def _keep(self, text: str) -> str:
        self._texts.append(text)
        return f"\6{len(self._texts) - 1}\7"

    def restored(self, text: str) -> str:
        while _NUMBERED.search(text):
            text = _NUMBERED.sub(lambda found: self._texts[int(found[1])], text)
        return text

    def as_it_is(self, found: re.Match[str]) -> str:
        """A listing or a formula; a comment is left out."""
        if found["comment"]:
            return _GONE + "\n" * found[0].count("\n")
        if found["verb"]:
            return self._keep(f"`{found['verb']}`")
        if found["code"]:
            options, _, code = found["code"].partition("\n")
            end = "```" if code.endswith("\n") else "\n```"
            return self._keep(f"```\n{code}{end}" if code else f"`{options}`")
        is_sign = len(found[0]) == 2
        return found[0] if is_sign else self._keep(re.sub(r"\\label\{[^{}]*\}", "", found[0]))

    def as_lines(self, found: re.Match[str]) -> str:
        """A table."""
        rows, merged = list[list[str]](), list[Merged]()
        for row in _ROW_END.split(found["rows"]):
            cells = list[str]()
            for cell in re.split(r"(?<!\\)&", row):
                columns = int(spanning[1]) if (spanning := _COLUMNS.search(cell)) else 1
                merged.append((len(rows), len(cells), len(rows), len(cells) + columns - 1))
                cells.append(" ".join(self.restored(_plain(cell)).split()))
                cells += [""] * (columns - 1)
            rows.append(cells)
        lines = "\n".join(sheet_tables(rows, merged)).replace("\n\n", "\n")
        return self._keep(lines + "\n" * (found[0].count("\n") - lines.count("\n")))


def _plain(text: str) -> str:
    for pattern, meant in _STEPS:
        text = re.sub(pattern, meant, text)
    return text


def _front(head: str, length: int) -> str:
    """The title, the authors and the like of a preamble of so many lines."""
    found = _FRONT.findall(head)
    lines = (f"{'# ' * (kind == 'title')}{' '.join(words.split())}" for kind, words in found)
    text = "\n".join(lines)
    return text + "\n" * (max(length - text.count("\n"), bool(text)))


def _heading(found: re.Match[str]) -> str:
    words = f"{_HEADINGS[found['kind']]} {' '.join(found[3].split())}"
    before = "" if found["before"] is not None else "\n"
    return before + words + "\n" * (found[0].count("\n") or found["after"] is None)


def _without_removed(found: re.Match[str]) -> str:
    """A paragraph with the lines that removals emptied at its end."""
    lines = found[0].split("\n")
    kept = [line for line in lines if line.strip(f" \t{_GONE}") or not line]
    return "\n".join(kept + [""] * (len(lines) - len(kept)))

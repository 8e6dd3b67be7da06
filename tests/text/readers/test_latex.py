"""LaTeX is read as Markdown, and nothing of its text is lost."""

import time

import pytest

from revela.searching.locations import starts
from revela.text.chunk import chunk
from revela.text.headings import titles
from revela.text.load import read_corpus
from revela.text.readers.latex import plain_latex

PAPER = r"""% !TEX program = xelatex
\documentclass[11pt]{article}
\usepackage[utf8]{inputenc}
\newcommand{\bee}[1]{\textit{Apis #1}}
\title{How bees
  \emph{dance}}
\author{Karl M\"uller\thanks{Supported by no one.}}
\begin{document}
\maketitle
\section[Dance]{The dance of $n$ bees}\label{sec:dance}
A bee dances~\cite[p.~3]{frisch} to tell % not by sound
% which was thought before
the others where \textbf{the \emph{flowers}} are\footnote{Or water.}.
\index{dance}

It takes 5\,\% of the day --- see Section~\ref{sec:dance} and \href{https://b.org/a}{the film}.
\begin{itemize}
  \item A round dance: near.
  \item[Far] A \bee{mellifera} waggles, see \verb|\dance{x_1}|.
\end{itemize}
\begin{equation}\label{eq:a} d = \frac{t}{2} \end{equation}
\begin{verbatim}
dance --slow  % 3 \times
\end{verbatim}
\begin{table}[htbp]
\caption{Speeds}
\begin{tabular}{lrr}
\toprule
 & \multicolumn{2}{c}{Speed} \\
Kind & low & high \\ \midrule
worker \& \textit{drone} & 1 & 2 \\
queen & 3 & 4 \\[2pt]
\end{tabular}
\end{table}
\subsection{Why} \LaTeX{} is as \foo as \unknown{a queen} in Fran\c{c}ois' \ss.
\end{document}
"""
FOUND = [
    "# How bees dance",
    "Karl Müller (Supported by no one.)",
    "## The dance of $n$ bees",
    "A bee dances [frisch] to tell the others where the flowers are (Or water.).",
    "It takes 5 % of the day — see Section and [the film](https://b.org/a).",
    "- A round dance: near.",
    r"- Far: A mellifera waggles, see `\dance{x_1}`.",
    r"d = \frac{t}{2}",
    r"``` dance --slow % 3 \times ```",
    "Kind: worker & drone; Speed low: 1; Speed high: 2 Kind: queen; Speed low: 3; Speed high: 4",
    "### Why LaTeX is as foo as a queen in François' ß.",
]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_commands_go_and_their_text_stays(tmp_path, end):
    (tmp_path / "a.tex").write_bytes(PAPER.replace("\n", end).encode())
    (document,) = read_corpus([tmp_path])[0]
    text = " ".join(document.text.split())
    assert document.title == "How bees dance"
    assert [line for line in FOUND if line not in text] == []
    for gone in ("usepackage", "toprule", "thought before", "sec:dance", "maketitle", "htbp"):
        assert gone not in text


def test_sections_are_titles_and_lines_keep_their_numbers(tmp_path):
    (tmp_path / "a.tex").write_text(PAPER)
    (document,) = read_corpus([tmp_path])[0]
    pieces = [piece.text for piece in chunk(document, 0, 25)]
    places = [place.line for place in starts(document, pieces)]
    lines = PAPER.split("\n")
    at = next(i for i, piece in enumerate(pieces) if piece.lstrip().startswith("## The dance"))
    assert lines[places[at] - 1].startswith(r"\section")
    assert titles(document, pieces)[at + 1] == "How bees dance > The dance of $n$ bees"
    numbers = [i for i, line in enumerate(document.text.split("\n")) if "It takes" in line]
    assert numbers == [i for i, line in enumerate(lines) if line.startswith("It takes")]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (r"\documentclass{a}\begin{document}\section{Bats}Bats hear.\end{document}",
         "## Bats\nBats hear."),
        (r"\chapter{Bats}\emph{They {hear", "# Bats\nThey hear"),
        (r"\begin{verbatim} no end", " no end"),
        (r"costs \$5 and \$6 \{x\} \textbackslash a\_b", "costs $5 and $6 {x} \\ a_b"),
        (r"a \begin{myquote}Wax\end{myquote}", "a Wax"),
        (r"\documentclass{article} and no more", " and no more"),
        ("\\begin{frame}{Wax}\n\\begin{block}{Kinds} hard", "### Wax\nKinds hard"),
        (r"\begin{tabular}{ll} a & b \\ \begin{tabular}{l} c \\ d \end{tabular} & e \end{tabular}",
         "a: b\nc d: e"),
        ("}}} \\end{b} $ \\( ]", r"  $ \( ]"),
        ("\x060\x07", "0"),
    ],
)  # fmt: skip
def test_parts_of_files_and_broken_ones(source, text):
    assert plain_latex(source)[1] == text


BROKEN = [
    *("{", " ", "%", "\n", "$ a ", "\\", r"\emph{", r"\section{a", r"\begin{math}", r"\( "),
    *(r"\begin{verbatim}", r"\begin{tabular}{l}a & b \\", r"\foo[", r"\label{a}"),
]


@pytest.mark.parametrize("piece", BROKEN)
def test_broken_files_take_no_quadratic_time(piece):
    begin = time.process_time()
    plain_latex(piece * (200_000 // len(piece)))
    assert time.process_time() - begin < 2

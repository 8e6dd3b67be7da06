"""Formats of files, by the endings of their names."""

from __future__ import annotations

from pathlib import Path

COMPRESSED = (".gz", ".zst")  # of any format
# Text is code if it has one of these endings, or begins with #!; otherwise prose.
CODE = frozenset(
    """.asm .awk .bash .bat .c .cc .cfg .cjs .clj .cmake .cmd .conf .cpp .cs .css .cts .cu .cxx .d
    .dart .diff .el .erl .ex .exs .f90 .fish .fs .go .gradle .groovy .h .hh .hpp .hs .ini .java .jl
    .js .json .jsx .kt .kts .less .lisp .lua .m .mjs .mk .ml .mm .mts .nim .pas .patch .php .pl .pm
    .properties .proto .ps1 .py .pyi .pyx .r .rb .rs .sass .scala .scm .scss .sh .sol .sql .svelte
    .swift .tcl .tf .toml .ts .tsx .vb .vim .vue .xml .yaml .yml .zig .zsh""".split()  # noqa: SIM905
)
# Formats that are Markdown, or are converted to it.
MARKDOWN = frozenset(
    """.md .markdown .mdx .qmd .rmd .ipynb .docx .docm .pptx .pptm .xlsx .xlsm .epub .odt .ods .odp
    .tex .ltx""".split()  # noqa: SIM905
)


def suffix(name: str | Path) -> str:
    """The ending that tells the format of a file or a document: ``.jsonl`` for ``a.jsonl.gz``."""
    path = Path(name)
    return Path(path.stem if path.suffix in COMPRESSED else path).suffix.lower()

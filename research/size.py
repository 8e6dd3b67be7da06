"""How large the project is: lines of src, tests and research, and the settings of `train --help`.

python -m research.size
"""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
# A row of the help that begins with a flag, or with an argument and its flag.
SETTING = re.compile(r"│ (?:[ *]  )?(?:[A-Z]+ )?--[a-z]", re.M)
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
NO_CODE |= {tokenize.ENCODING, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    """Lines of Python without blank lines, comments and docstrings."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def main() -> None:
    for folder in ("src", "tests", "research"):
        command = ["git", "ls-files", "-co", "--exclude-standard", folder]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        files = [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
        files = [file for file in files if file.suffix not in (".md", ".png")]
        texts = {file: file.read_text(encoding="utf-8") for file in files}
        python = [text for file, text in texts.items() if file.suffix == ".py"]
        lines = sum(map(len, map(str.splitlines, texts.values())))
        code = sum(map(code_lines, python))
        print(f"{folder}: {lines:,} lines in {len(texts)} files, {code:,} of them code")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}
    shown = subprocess.run(
        [sys.executable, "-m", "revela", "train", "--help"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    print(f"train --help: {len(SETTING.findall(shown.stdout))} settings")


if __name__ == "__main__":
    main()

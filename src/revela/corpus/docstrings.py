"""Python source -> its documented functions: what their author says they do, and the code that does
it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from revela.corpus.code import parsed, split_lines

MIN_WORDS = 3  # of a docstring's first paragraph


def documented_functions(source: str) -> Iterator[tuple[str, str]]:
    """(the docstring's first paragraph, the function without its docstring) of every function and
    method; nothing if it is not Python.
    """
    tree = parsed(source)
    if tree is None:
        return
    lines = [line.rstrip("\r\n") for line in split_lines(source)]  # counted as ast counts them
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
            continue
        docstring = ast.get_docstring(node)
        first = node.body[0]
        if not docstring or first.lineno == node.lineno:
            continue
        query = " ".join(docstring.split("\n\n")[0].split())
        body = (
            lines[node.lineno - 1 : first.lineno - 1]
            + lines[(first.end_lineno or first.lineno) : node.end_lineno]
        )
        function = "\n".join(
            line[node.col_offset :] if line[: node.col_offset].isspace() else line for line in body
        )
        if len(query.split()) >= MIN_WORDS:
            yield query, function

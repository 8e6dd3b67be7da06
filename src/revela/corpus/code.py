"""Source code -> functions, methods and classes, by the language's own parser.

Python is parsed by ast, the languages of ``GRAMMARS`` by tree-sitter; where neither knows the
language or the file, a unit starts after a blank line at the margin. Tree-sitter pays: of functions
that would fit into a chunk of 48 words, that rule cuts 24 % in JavaScript and in PHP, 6 % in C++
and 5 % in C; with the grammars it is 8, 13, 4 and 3 % (docs/log.md).
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import warnings
from collections.abc import Container, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tree_sitter import Node

LONGEST = 2**22  # characters; a longer file is data, and its tree would take gigabytes

# Module and function that hold the grammar.
GRAMMARS = {
    **dict.fromkeys((".js", ".mjs", ".jsx"), ("tree_sitter_javascript", "language")),
    ".ts": ("tree_sitter_typescript", "language_typescript"),
    ".tsx": ("tree_sitter_typescript", "language_tsx"),
    ".java": ("tree_sitter_java", "language"),
    ".go": ("tree_sitter_go", "language"),
    ".rs": ("tree_sitter_rust", "language"),
    ".c": ("tree_sitter_c", "language"),
    **dict.fromkeys((".h", ".cc", ".cpp", ".cxx", ".hpp"), ("tree_sitter_cpp", "language")),
    ".cs": ("tree_sitter_c_sharp", "language"),
    ".rb": ("tree_sitter_ruby", "language"),
    ".php": ("tree_sitter_php", "language_php"),
}
PYTHON = frozenset({".py", ".pyi"})

# What the grammars call a function (a function inside one stays with it) and a class, and what may
# stand around and before them.
FUNCTIONS = frozenset({
    "function_definition", "function_declaration", "generator_function_declaration", "function_item", "macro_definition",
    "method_definition", "method_declaration", "method", "singleton_method", "constructor_declaration", "compact_constructor_declaration",
    "destructor_declaration", "operator_declaration", "function_expression", "arrow_function",
})  # fmt: skip
CLASSES = frozenset({
    "class_declaration", "class_specifier", "struct_specifier", "class", "module", "interface_declaration", "enum_declaration",
    "record_declaration", "struct_declaration", "trait_declaration", "abstract_class_declaration", "struct_item", "enum_item",
    "trait_item", "impl_item", "mod_item", "union_item", "type_declaration", "namespace_definition", "namespace_declaration",
})  # fmt: skip
AROUND = frozenset({
    "export_statement", "template_declaration", "expression_statement", "lexical_declaration", "variable_declaration",
    "variable_declarator", "assignment_expression", "declaration", "pair", "public_field_definition",
})  # fmt: skip
BEFORE = frozenset(
    {"comment", "line_comment", "block_comment", "attribute_item", "decorator", "preproc_call"}
)

Definitions = tuple[
    set[int], set[int]
]  # lines where functions and classes begin, and lines inside of functions


def units(text: str, name: str) -> list[str]:
    """Cut source code where its functions and classes begin; joined, the units are the text.

    Comments and decorators go with what they stand before; code between functions is cut at the
    margin.

    Args:
        text: the file.
        name: its name or id, whose ending says which language it is; without a known ending, Python
            is tried.
    """
    lines = split_lines(text)
    ending = Path(name.removesuffix(".gz")).suffix.lower()
    found: Definitions | None = None
    if len(text) <= LONGEST:
        found = (
            _tree_sitter(text, *GRAMMARS[ending]) if ending in GRAMMARS else _python(text, lines)
        )
    starts, inside = found or (set(), set())
    return joined(lines, starts | (margins(lines) - inside))


def split_lines(text: str) -> list[str]:
    """Lines as parsers count them: str.splitlines would also break at form feeds and the like."""
    return re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", text)


def joined(lines: list[str], starts: Container[int]) -> list[str]:
    """Lines together, a new unit at each start."""
    found: list[str] = []
    current: list[str] = []
    for i, line in enumerate(lines):
        if current and i in starts:
            found.append("".join(current))
            current = []
        current.append(line)
    if current:
        found.append("".join(current))
    return found


def margins(lines: list[str]) -> set[int]:
    """Lines at the margin that follow a blank one."""
    return {
        i
        for i in range(1, len(lines))
        if not lines[i - 1].strip() and lines[i].strip() and not lines[i][0].isspace()
    }


def parsed(source: str) -> ast.Module | None:
    """None if this is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the file's own faults, such as "\\d"
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _python(text: str, lines: list[str]) -> Definitions | None:
    """None if this is not Python."""
    tree = parsed(text)
    if tree is None:
        return None
    starts: set[int] = set()
    inside: set[int] = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
                while first and lines[first - 1].lstrip().startswith("#"):
                    first -= 1
                starts.add(first)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inside.update(range(first, node.end_lineno or first))
            elif isinstance(node, ast.stmt | ast.ExceptHandler):
                waiting.append(node)
    return starts, inside


def _tree_sitter(text: str, module: str, function: str) -> Definitions:
    starts: set[int] = set()
    inside: set[int] = set()
    waiting = [_parser(module, function).parse(text.encode()).root_node]
    while waiting:
        for node in waiting.pop().children:
            if node.is_named and (
                node.type in FUNCTIONS or node.type in CLASSES
            ):  # the word "class" is a node too
                starts.add(_first_line(node))
            if node.type in FUNCTIONS:
                inside.update(range(node.start_point.row, node.end_point.row + 1))
            elif node.end_point.row > node.start_point.row:
                waiting.append(node)
    return starts, inside


def _first_line(node: Node) -> int:
    while node.parent is not None and (
        node.parent.type in AROUND or node.parent.start_point == node.start_point
    ):
        node = node.parent
    first = node.start_point.row
    before = node.prev_sibling
    while before is not None and before.type in BEFORE and before.end_point.row >= first - 1:
        further = before.prev_sibling
        if (
            further is not None
            and further.end_point.row == before.start_point.row
            and further.end_point.column
        ):
            break  # a comment at the end of another line
        first, before = before.start_point.row, further
    return first


@functools.cache
def _parser(module: str, function: str) -> Any:
    from tree_sitter import Language, Parser

    return Parser(Language(getattr(importlib.import_module(module), function)()))


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

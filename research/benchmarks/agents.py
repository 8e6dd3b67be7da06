"""What an answer costs an agent: `search` of `revela mcp`, or grep and reading files.

    python -m research.benchmarks.agents --text TEXT/devdocs_python.jsonl.gz

The pages of Django, its REST framework, Flask and Werkzeug are written as files. Twenty questions
are asked, each with a pattern that an agent would search for and one that an answer holds. By grep
an agent lists the files that match, and reads those with the most matching lines, each to its
2,000th line, as coding agents do; or it reads five lines around each match, of the first 25,000
tokens. Tokens are counted as `revela mcp` does.
"""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from research.benchmarks.options import parser_of, print_cells, print_header
from revela.searching.folder_index import open_any
from revela.searching.server.mcp import Tools
from revela.searching.server.token_budget import count_tokens

PAGES = ("django~4.0/", "django_rest_framework/", "flask~2.0/", "werkzeug~2.0/")
LINES, MOST_TOKENS = 2000, 25_000
# Question, pattern for grep, pattern of the answer.
QUESTIONS = (
    ("How long does a session last by default?", "session.*expir", "1209600"),
    ("How do users stay logged in when they change their password?",
     "password.*change", "update_session_auth_hash"),
    ("How do I run code whenever an object is saved?", "is saved", "post_save"),
    ("How do I avoid one query for each related object?",
     "related objects?.*quer", "select_related|prefetch_related"),
    ("How can I limit how many requests a client of the API makes?",
     "limit.*requests", "DEFAULT_THROTTLE_RATES|throttle_classes"),
    ("How do I let users download a file in Flask?", "download", "send_file|send_from_directory"),
    ("How does a Flask view answer with JSON?", "json", "jsonify"),
    ("Which setting lists the domains that a site may serve?", "domain", "ALLOWED_HOSTS"),
    ("How are users logged out when they close their browser?",
     "clos.*browser|browser.*clos", "SESSION_EXPIRE_AT_BROWSER_CLOSE"),
    ("How do I undo a migration?", "(undo|revers|revert).*migration", r"migrate \w+ (zero|0)"),
    ("How does a test check which mails were sent?", "test.*mail|mail.*test", r"mail\.outbox"),
    ("How do I add a column to the list of objects in the admin?",
     "admin.*column|column.*admin", "list_display"),
    ("How are passwords stored?", "stor.*password|password.*stor", "PBKDF2"),
    ("How do I limit the size of uploads in Flask?",
     "upload.*size|size.*upload", "MAX_CONTENT_LENGTH"),
    ("How do I show a user a message on the next page in Flask?", "message", r"flash\("),
    ("How do I cache a part of a template?", "cach.*template|template.*cach", r"\{% cache"),
    ("How do I keep two transactions from changing one row?",
     "lock.*row|row.*lock", "select_for_update"),
    ("How do I sign a value so that it expires?",
     "sign.*expir|expir.*sign", "TimestampSigner|max_age"),
    ("How does the site know of HTTPS behind a proxy?", "proxy", "SECURE_PROXY_SSL_HEADER"),
    ("How do I get the address of a client behind a proxy in Werkzeug?", "proxy", "ProxyFix"),
)  # fmt: skip


def write_pages(text: Path, folder: Path) -> int:
    """Write the pages as files; how many."""
    count = 0
    with gzip.open(text, "rt", encoding="utf-8") as lines:
        for page in map(json.loads, lines):
            if page["id"].startswith(PAGES):
                file = folder / f"{page['id']}.md"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(page["text"], encoding="utf-8")
                count += 1
    return count


def grep(folder: Path, *flags: str) -> str:
    return subprocess.run(["grep", *flags, "."], cwd=folder, capture_output=True, text=True).stdout


def files_read(folder: Path, pattern: str, most: int) -> str:
    """What an agent reads that lists the files that match, and opens some."""
    listed = grep(folder, "-rilE", pattern)
    counted = (line.rpartition(":") for line in grep(folder, "-ricE", pattern).splitlines())
    by_matches = sorted(((int(count), name) for name, _, count in counted), reverse=True)
    read = [listed]
    for count, name in by_matches[:most]:
        if count:
            lines = (folder / name).read_text(encoding="utf-8").splitlines()
            read += [f"{i}\t{line}" for i, line in enumerate(lines[:LINES], 1)]
    return "\n".join(read)


def lines_read(folder: Path, pattern: str) -> str:
    """What it reads that asks for the lines around each match."""
    text = grep(folder, "-rinE", "-C", "5", pattern)
    return text if count_tokens(text) <= MOST_TOKENS else text[: 3 * MOST_TOKENS]


def print_row(name: str, answers: Sequence[str]) -> None:
    tokens = [count_tokens(answer) for answer in answers]
    found = [
        bool(re.search(asked[2], text)) for asked, text in zip(QUESTIONS, answers, strict=True)
    ]
    numbers = (median(tokens), max(tokens), sum(tokens))
    print_cells(name, [f"{sum(found)} of {len(found)}", *(f"{n:,.0f}" for n in numbers)])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--text", type=Path, required=True, help="pages as JSON lines, gzip")
    parser.add_argument("--model", default="embedded:minilm-l6", help="as for `revela search`")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "pages")
        print(f"{write_pages(arguments.text, folder)} files")
        index = open_any(folder, arguments.model)
        tools = Tools("pages", lambda: index, {}, folder)
        answers = defaultdict[str, list[str]](list)
        for question, pattern, _ in QUESTIONS:
            for k in (3, 10):
                found = tools.search(question, k)
                answers[f"`search`, k={k}"].append(found.content[0].text)
            answers["grep, five lines around"].append(lines_read(folder, pattern))
            for most in (1, 3):
                name = f"grep, then {most} file{'s' * (most > 1)}"
                answers[name].append(files_read(folder, pattern, most))
        print_header(["answer within", "tokens, median", "most", "total"])
        for name, texts in answers.items():
            print_row(name, texts)


if __name__ == "__main__":
    main()

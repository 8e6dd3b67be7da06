"""What is read and found in a person's folder, and what is said where it does not answer.

    python -m research.benchmarks.folder

Made of what any Debian machine can have: the documentation of some packages (``apt-get download``)
and the files of folder_files.py. `revela index` reads it as `revela search FOLDER` does; then each
question whose answer is there is searched, and each whose answer is not, and what is said of the
first hit is counted, by whether it is right.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

from research.benchmarks.folder_files import QUESTIONS, UNANSWERED, write_files
from research.benchmarks.options import OUT, parser_of, print_cells, print_header
from revela.searching.index import Index
from revela.types import ANSWERS, Hit

PACKAGES = [
    "apt-doc",
    "cron",
    "debian-faq",
    "dpkg-dev",
    "nginx-doc",
    "npm",
    "python-apt-doc",
    "rsync",
    "sudo",
]


def write_folder(folder: Path) -> None:
    """The documentation of the packages, and the files that are made."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        archives, contents, done = (Path(made) / name for name in ("deb", "contents", "done"))
        archives.mkdir()
        done.mkdir()
        subprocess.run(["apt-get", "-q", "download", *PACKAGES], cwd=archives, check=True)
        for archive in archives.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", archive, contents], check=True)
        (contents / "usr/share/doc").rename(done / "doc")
        write_files(done)
        done.rename(folder)


def answers(hit: Hit, paths: str) -> bool:
    return any(fnmatchcase(hit.id, pattern) for pattern in paths.split("|"))


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=OUT / "folder", help="for the folder and its index")
    add("--model", help="as for `revela index`")
    add("--verbose", action="store_true", help="print the first hit of each question")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    folder, out = arguments.out / "files", arguments.out / "index"
    if not folder.exists():
        write_folder(folder)
    command = [sys.executable, "-m", "revela", "index", folder, "--out", out, "--keep-tokens"]
    command += ["--model", arguments.model] if arguments.model else []
    subprocess.run([*command, "--sync"], check=True)
    index = Index.open(out)
    said = {kind: Counter[str]() for kind in ("right", "wrong", "no answer")}
    for query, paths in {**QUESTIONS, **dict.fromkeys(UNANSWERED, "")}.items():
        hits = index.search(query, 1, rerank="late-interaction")
        kind = "no answer" if not paths else "right" if answers(hits[0], paths) else "wrong"
        said[kind][str(hits.answer)] += 1
        if arguments.verbose:
            print(f"{kind:9} {hits.answer!s:8} {hits[0].score:.3f} {query}  ->  {hits[0].id}")
    print_header(["of", *ANSWERS.values()])
    for kind, counts in said.items():
        print_cells(kind, [counts.total(), *(counts[str(answer)] for answer in ANSWERS)])


if __name__ == "__main__":
    main()

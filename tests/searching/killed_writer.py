"""An index whose writer is killed: the writer (run as a script), and what its killer checks.

A document is named d7 and says in every chunk which of its versions it is; the writer prints "d7 3"
when version 3 is safe on disk.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from revela.searching.index import Index
from revela.types import Document
from tests.searching.letters import build, reopen, rows_of, wanted_rows

NAMES = 60
ROOT = Path(__file__).parents[2]


def versioned(name: str, version: int) -> Document:
    """Its length changes with its version, so that replacing it adds chunks or takes some away."""
    chunks = 1 + hash((int(name[1:]), version)) % 5
    return Document(name, " ".join(f"v{version} abba part{n}." for n in range(chunks)))


def write_for_ever(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    index = reopen(folder)
    with index.changes() as changes:
        print("begun", flush=True)
        while True:
            for _ in range(rng.randrange(1, 5)):
                names = rng.sample([f"d{i}" for i in range(NAMES)], 8)
                changes.put(versioned(name, seed) for name in names)
                print(*(f"{name} {seed}" for name in names), sep="\n", flush=True)
                seed += 1000
            changes.finish()


def kill_while_appending(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """Kill the writer again and again; after each kill the index must open and hold what was
    acknowledged, once. Returns how many versions of how many documents that were.
    """
    rng = random.Random(seed)
    build(folder, [Document("first", "abba.")])
    safe: dict[str, int] = {}
    acknowledged = 0
    for turn in range(1, kills + 1):
        arguments = "-m", "tests.searching.killed_writer", str(folder.resolve()), str(turn)
        command = [sys.executable, *arguments]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert writer.stdout is not None and writer.stdout.readline() == "begun\n"
        # The first writer has acknowledged something, however slow the machine is.
        first = writer.stdout.readline() if turn == 1 else ""
        time.sleep(rng.uniform(0, 1.5))
        writer.kill()
        for name, version in map(str.split, (first + writer.stdout.read()).splitlines()):
            safe[name] = int(version)
            acknowledged += 1
        writer.wait()
        safe |= check(reopen(folder), safe, turn)  # what was made and not acknowledged stays
    return {"kills": kills, "acknowledged": acknowledged, "documents": len(safe)}


def check(index: Index, safe: dict[str, int], turn: int) -> dict[str, int]:
    """The versions that the index holds, of which none that was acknowledged is lost."""
    rows = rows_of(index)
    assert len({(name, chunk) for name, chunk, _ in rows}) == len(rows), "a row twice"
    held: dict[str, list[str]] = {}
    for name, _, text in rows:
        held.setdefault(name, []).append(text)
    assert held.pop("first") == ["abba."]
    assert safe.keys() <= held.keys(), "an acknowledged document is lost"
    versions = {name: int(texts[0].split()[0][1:]) for name, texts in held.items()}
    for name, texts in held.items():
        version = versions[name]
        wanted = [text for *_, text in wanted_rows([versioned(name, version)])]
        assert texts == wanted, f"{name} is not whole"
        # The last commit may have been made and not acknowledged.
        assert name not in safe or version == safe[name] or newer(version, safe[name], turn)
    assert len(index.search("abba", NAMES + 1)) == len(held) + 1
    return versions


def newer(version: int, than: int, turn: int) -> bool:
    """Versions of a turn are turn, turn + 1000, turn + 2000 ..."""
    return version % 1000 == turn and (than % 1000 != turn or version > than)


if __name__ == "__main__":
    write_for_ever(Path(sys.argv[1]), int(sys.argv[2]))

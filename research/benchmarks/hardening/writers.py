"""Two processes that write to one place at once: an index, a training folder, groups, queries.

Both start at the same moment. Each must succeed or be refused in one sentence, at least one must
succeed, and what is written must be whole.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from research.benchmarks.hardening.fuzz import sound_inputs
from research.benchmarks.hardening.kills import FLAGS, refuse_half, temporary
from research.benchmarks.hardening.made import environment, fault, report, revela

QUERIES = """
import sys
from pathlib import Path
from revela.corpus.written_queries import Answer, QueryFile
file, who = QueryFile(Path(sys.argv[1]), "tiny"), sys.argv[2]
for i in range(int(sys.argv[3])):
    file.add([f"{who} {i} {j}" for j in range(8)], [Answer(f"what is {who} {i}?" * 50)] * 8)
"""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--added", type=int, default=300, help="batches of eight queries")


def at_once(commands: list[list[object]], cache: Path) -> list[tuple[int, str]]:
    """Run these together; their codes and what they said on stderr."""
    begun = [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=environment(cache),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    return [(process.wait(), errors) for process in begun for errors in [process.communicate()[1]]]


def run(a: argparse.Namespace) -> int:
    """Every pair so many times; how many went wrong."""
    wrong, ends = 0, Counter[str]()
    with tempfile.TemporaryDirectory(prefix="hardening-") as home:
        place = Path(home)
        sound = sound_inputs(place)
        few = [flag if flag != "40" else "9" for flag in FLAGS]
        models: list[object] = ["--model", sound.lm, "--lm", sound.lm]
        for turn in range(a.times):
            out = place / f"out-{turn}"
            known: dict[str, list[object]] = {
                "index": ["index", sound.corpus, "--model", sound.retriever],
                "train": ["train", sound.groups, *models, *few],
                "groups": ["groups", sound.corpus, "--group-size", "4"],
            }
            for name, command in known.items():
                target = out / name
                both = [["-m", "revela", *command, "--out", target]] * 2
                found = at_once(both, place / "cache")
                faults = [fault(*end) for end in found if fault(*end)]
                codes = sorted(code for code, _ in found)
                ends[f"{name} {codes}"] += 1
                left = [p for p in temporary(target) if p != ".lock"]
                refuse_half(target)
                if name == "index":
                    done = revela("search", target, "ocean1", cache=place / "cache")
                    faults += [done.stderr] if done.returncode else []
                bad = bool(faults or left or codes[0])
                wrong += bad
                print(name, codes, faults, left, flush=True)
            file = out / "queries.jsonl"
            writers = [["-c", QUERIES, file, who, a.added] for who in "ab"]
            found = at_once(writers, place / "cache")
            lines = [json.loads(line) for line in file.read_bytes().splitlines()]
            whole = len({line["passage"] for line in lines}) == len(lines) == 2 * 8 * a.added
            ends[f"queries {[code for code, _ in found]}"] += 1
            wrong += not whole or any(code for code, _ in found)
            print("queries", [code for code, _ in found], len(lines), [e[-200:] for _, e in found])
    report("writers", times=a.times, ends=ends, wrong=wrong)
    return wrong

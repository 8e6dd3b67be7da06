"""A disk that is full, and a folder that can only be read: train, index, export, report, groups.

Each command writes to a small tmpfs (as root), filled to leave so many bytes. It must end with one
sentence and exit code 2, or succeed, and leave nothing half done; after room is made, `train
--resume` and the same `index` go on.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from research.benchmarks.hardening.fuzz import sound_inputs
from research.benchmarks.hardening.inputs import Sound
from research.benchmarks.hardening.kills import FLAGS, refuse_half
from research.benchmarks.hardening.made import fault, report, revela

SIZE = 8 * 2**20  # bytes of the disk
ROOMS = [0, 4_096, 30_000, 100_000, 300_000, 1_000_000, 3_000_000]  # left when a command starts


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A tmpfs, as root."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@contextmanager
def only_to_read(place: Path) -> Iterator[Path]:
    """A folder that root cannot write to, either."""
    place.mkdir()
    subprocess.run(["mount", "--bind", place, place], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", place], check=True)
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def fill(disk: Path, room: int) -> None:
    """Write a file that leaves so many bytes."""
    free = shutil.disk_usage(disk).free
    with (disk / "filler").open("wb") as handle:
        handle.write(b"\0" * max(0, free - room))


def commands(sound: Sound, disk: Path, run: Path) -> dict[str, list[object]]:
    """What writes to the disk, by its name."""
    train = ["train", sound.corpus, "--out", disk / "train", "--model", sound.lm, "--lm", sound.lm]
    index = ["index", sound.corpus, "--out", disk / "index", "--model", sound.retriever]
    few = [flag if flag != "40" else "9" for flag in FLAGS]
    return {
        "train": [*train, *few, "--chunk-words", "12"],
        "index": index,
        "groups": ["groups", sound.corpus, "--out", disk / "groups", "--group-size", "4"],
        "export": ["export", run, "--out", disk / "onnx"],
        "report": ["report", run, "--out", disk / "report.html"],
        "eval": ["eval", sound.retriever, "--on", sound.collection, "--json", disk / "s.json"],
    }


def half_done(disk: Path) -> list[str]:
    """What a refused command has left that is not whole."""
    refuse_half(disk / "train")
    left = [str(p.relative_to(disk)) for p in disk.glob(".*")]
    if (disk / "groups").exists() and not (disk / "groups" / "groups.json").exists():
        left.append("groups")
    return left + [str(p.relative_to(disk)) for p in (disk / "train").glob(".*-*")]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rooms", type=int, nargs="*", default=ROOMS, help="bytes that are left")
    parser.add_argument("--only", nargs="*", help="names of commands")


def run(a: argparse.Namespace) -> int:
    """All commands with every amount of room; how many did harm."""
    wrong, ends, resumed = 0, Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="hardening-") as home:
        place = Path(home)
        sound = sound_inputs(place)
        made = commands(sound, place, place / "train")
        done = revela(*made["train"], cache=place / "cache")
        assert done.returncode == 0, done.stderr
        for name in a.only or made:
            for room in a.rooms:
                with small_disk(place / "disk") as disk:
                    command = commands(sound, disk, place / "train")[name]
                    fill(disk, room)
                    done = revela(*command, cache=place / "cache")
                    faulty = fault(done.returncode, done.stderr)
                    left = half_done(disk) if done.returncode == 2 else []
                    ends[f"{name} {done.returncode}"] += 1
                    if done.returncode == 2:
                        (disk / "filler").unlink()
                        more = ["--resume"] if (disk / "train" / "run.json").exists() else []
                        again = revela(*command, *more, cache=place / "cache")
                        resumed[f"{name} {again.returncode}"] += 1
                        faulty = faulty or (again.stderr[-300:] if again.returncode else "")
                shutil.rmtree(place / "disk")
                wrong += bool(faulty or left)
                print(name, room, done.returncode, done.stderr.strip()[-200:], faulty, left)
            with only_to_read(place / "disk") as disk:
                done = revela(*commands(sound, disk, place / "train")[name], cache=place / "cache")
                faulty = fault(done.returncode, done.stderr)
                ends[f"{name} read-only {done.returncode}"] += 1
                wrong += bool(faulty) or done.returncode != 2
                print(name, "read-only", done.returncode, done.stderr.strip()[-200:], faulty)
            shutil.rmtree(place / "disk")
    assert os.geteuid() == 0
    report("disk", rooms=a.rooms, ends=ends, after_room_was_made=resumed, wrong=wrong)
    return wrong

"""Run `revela train` and `revela eval` as commands, under torchrun if there are several GPUs.

A command whose result exists is skipped, so an interrupted comparison continues where it stopped,
and each command can be run by hand.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from revela.encoders.torch_model import uses_bf16
from revela.errors import RevelaError
from revela.files import remove_whole
from revela.text.judgements import jsonl_file
from revela.training.device import compute_device
from revela.training.groups.store import is_group_folder
from revela.training.recipe import Recipe
from revela.training.record import RunFile
from revela.training.settings import TorchPrecision
from revela.training.step import handled

MODULES = "modules.json"  # of a complete Sentence-Transformers folder
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node")


@dataclass(frozen=True)
class Command:
    """A command of revela.

    Attributes:
        words: the verb and its arguments.
        makes: the file or folder that exists when the command has finished.
        after: what it reads; ``makes`` is made again if it is older.
        processes: more than one are started by torchrun.
    """

    words: Sequence[str]
    makes: Path
    after: Path | None = None
    processes: int = 1

    def __str__(self) -> str:
        several = [*TORCHRUN, str(self.processes), "-m"] if self.processes > 1 else []
        return shlex.join([*several, "revela", *self.words])

    @property
    def is_done(self) -> bool:
        """Whether ``makes`` is there, and newer than what it is made from."""
        if self.words[0] == "train":
            return is_finished(self.makes.parent)
        after = self.after.stat().st_mtime if self.after and self.after.exists() else 0.0
        return self.makes.exists() and self.makes.stat().st_mtime >= after

    def run(self) -> None:
        """Run it, and forward the signals of this process to it.

        Raises:
            RevelaError: it failed, or was stopped; with its exit code.
        """
        torchrun = ["torch.distributed.run", *TORCHRUN[1:], str(self.processes), "-m"]
        start = torchrun if self.processes > 1 else []
        words = [sys.executable, "-m", *start, "revela", *self.words]
        if self.after is not None and self.makes.name == MODULES:  # the folder has to be new
            remove_whole(self.makes.parent)
        # In a session of its own, so that Ctrl-C reaches it once, through this process.
        child = subprocess.Popen(words, start_new_session=True)
        with handled(lambda number, _: child.send_signal(number)):
            code = child.wait()
        if code:
            code = code if code > 0 else 128 - code
            why = "was stopped" if code > 128 else f"ended with exit code {code}"
            error = RevelaError(f"{self} {why}: run the same command again to continue")
            error.exit_code = code
            raise error


def run_commands(
    commands: Iterable[Command], *, dry_run: bool = False, printed: set[str] | None = None
) -> None:
    """Print and run each command that is not done, once; the result of others is kept.

    Args:
        dry_run: print all, and run none.
        printed: commands of earlier calls, which are left out; those of this call are added.
    """
    printed = set() if printed is None else printed
    for command in commands:
        if str(command) in printed:
            continue
        printed.add(str(command))
        is_done = not dry_run and command.is_done
        print(f"already done: {command.makes}" if is_done else command, flush=True)
        if not (dry_run or is_done):
            command.run()


def processes_here() -> int:
    """The GPUs of this machine, each of which trains in a process of its own; 1 without any."""
    return max(1, torch.cuda.device_count())


def train_commands(
    corpus: Sequence[str],
    settings: Mapping[str, Any],
    out: Path,
    *,
    on: Sequence[Path] = (),
    points: int = 0,
    processes: int = 1,
) -> Iterator[Command]:
    """The commands that train a run: `revela train`, and for several processes before it `revela
    groups`, as they cannot read text together.

    Args:
        corpus: as for `revela train`.
        settings: by name, with the method.
        out: folder for the run; groups are stored in OUT-groups.
        on, points: as for `revela train`.
        processes: number of processes that train.
    """
    recipe = Recipe.of(**settings)
    flags = flags_of(settings)
    is_grouped = len(corpus) == 1 and is_group_folder(Path(corpus[0]))
    if processes > 1 and not (is_grouped or recipe.pairs):
        corpus, text = [f"{out}-groups"], corpus
        yield Command(["groups", *text, "--out", *corpus, *flags], Path(*corpus))
    judged = ["--on", *map(str, on), "--points", str(points)] if on else []
    words = ["train", *corpus, "--out", str(out), "--resume", *flags, *judged]
    yield Command(words, out / MODULES, processes=processes)


def eval_commands(
    model: Path | str,
    on: Sequence[Path],
    out: Path,
    *,
    slots: int = 0,
    precision: TorchPrecision = "auto",
    flags: Sequence[str] = (),
) -> Iterator[Command]:
    """The commands that score a model on each collection: `revela eval`, and for a contextual
    retriever before it `revela fit --context`, as it reads documents of the collection (CDE).

    Args:
        model: a retriever's folder, or another name that `revela eval` knows.
        on: folders in BEIR layout.
        out: folder for COLLECTION.json, the scores of all systems and queries.
        slots: context documents that the retriever reads.
        precision: of the training. By int8, nDCG@10 would move by more than some methods differ.
        flags: more flags of `revela eval`.
    """
    trained = Path(model) / MODULES
    for collection in on:
        read, text = str(model), str(jsonl_file(collection, "corpus.jsonl"))
        if slots:
            read = f"{model}-in-{collection.name}"
            words = ["fit", "--model", str(model), "--context", text, "--out", read]
            yield Command(words, Path(read) / MODULES, trained)
        file = out / f"{collection.name}.json"
        same = ["--precision", "bf16" if uses_bf16(precision, compute_device()) else "fp32"]
        words = ["eval", read, "--on", str(collection), "--json", str(file), *same, *flags]
        yield Command(words, file, trained)


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """Settings by name as flags of a command line."""
    words = list[str]()
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            values = value if isinstance(value, list | tuple) else [value]
            words += [f"--{flag}", *map(str, values)]
    return words


def is_finished(out: Path) -> bool:
    """Whether a folder has the retriever of a finished run."""
    return (out / MODULES).is_file() and RunFile.read(out).about.finished

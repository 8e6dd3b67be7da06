"""The entry of the command line, and its log. An error is one sentence, with exit code 2."""

from __future__ import annotations

import atexit
import gc
import io
import os
import re
import shlex
import signal
import sys

from cyclopts import App, CycloptsError, Group

import revela
from revela.errors import RevelaError, extra
from revela.files import disk_error
from revela.terminal import print_log, printable

app = App(
    name="revela",
    help=(revela.__doc__ or "").partition("\n\n")[0],
    version_flags=["--version"],
    group_commands=Group("Options", sort_key=5),
    result_action="return_value",
)
# The verbs as --help lists them; each is the function of its name in its file, whose docstring is
# its own help. The files are imported when the verb is used.
VERBS = {
    "Search": {
        "search": "Search a folder, a file or an index.",
        "serve": "Serve a folder or an index over HTTP: a page, search, embeddings, re-ranking.",
        "mcp": "Give a folder or an index to agents, by the Model Context Protocol.",
        "index": "Make an index; add to it, delete from it, or synchronise it.",
        "cache": "List or remove the cached indices that search and serve use.",
    },
    "Train": {
        "fit": "Fit a raw language model to text: a retriever in minutes, without labels.",
        "train": "Train a retriever on raw text.",
        "compare": "Train several methods or variants from the same start, and compare them.",
        "groups": "Build the groups of chunks that training compares.",
        "heads": "Rank the attention heads of a language model by how well they retrieve.",
    },
    "Measure": {
        "eval": "Score models and BM25, on judged queries or on your own text.",
        "probe": "Measure the position bias of a model, and the geometry of its vectors.",
        "queries": "Write queries for a corpus with a language model, or a test set of them.",
    },
    "Use it elsewhere": {
        "encode": "Write the chunks of a corpus and their vectors to a file.",
        "export": "Export a retriever to ONNX.",
    },
}
TRAINING_VERBS = ("train", "queries", "groups", "compare", "heads")


for place, (title, verbs) in enumerate(VERBS.items(), 1):
    group = Group(title, sort_key=place)
    for order, (verb, summary) in enumerate(verbs.items()):
        path = f"revela.cli.{verb}:{verb}"
        app.command(path, name=verb, group=group, sort_key=order, help=summary)


def main() -> None:
    """Run the command line; exits with 0, 2 (an error of the user's), 130 (Ctrl-C), 141 (a
    closed pipe, as after ``| head``) or 143 (SIGTERM).
    """
    if "RANK" not in os.environ:  # torchrun ends its processes itself
        # As an exception, so that temporary folders are removed.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for stream in (sys.stdout, sys.stderr):  # file names may not be UTF-8
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    atexit.register(_leave_garbage)
    tokens = sys.argv[1:]
    if tokens[:1] == ["search"]:  # no option has a space before its value: "-5 degrees" is a query
        tokens = [f" {token}" if re.match(r"-[^=\s]*\s", token) else token for token in tokens]
    # The stdout of these may be JSON or a protocol.
    print_log("stderr" if tokens[:1] in (["search"], ["mcp"]) else "stdout")
    try:
        prepare(tokens)
        # Under torchrun only rank 0 prints what is wrong with the command line.
        app(tokens, exit_on_error=False, print_error=os.environ.get("RANK", "0") == "0")
        sys.stdout.flush()  # here, where a closed pipe is caught
    except CycloptsError:  # it has printed what was wrong
        raise SystemExit(2) from None
    except RevelaError as error:
        print(f"revela: {printable(str(error))}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError:
        _discard_output()
        raise SystemExit(141) from None
    except Exception as error:
        if not (sentence := disk_error(error)):
            raise
        print(f"revela: {printable(sentence)}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _discard_output() -> None:
    """Keep the flush at exit from failing (Python's documentation, Note on SIGPIPE)."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())


def _leave_garbage() -> None:
    """Skip the garbage collection at exit, a tenth of ``revela search``; not with torch, as Triton
    needs it.
    """
    if "torch" not in sys.modules:
        gc.freeze()


def prepare(tokens: list[str]) -> None:
    """Give the verb of this command line its own help and, if it trains, its settings as flags.
    They are made for these verbs only, to keep the others fast.
    """
    if tokens and tokens[0] in (*TRAINING_VERBS, "fit"):
        with extra("train", f"revela {tokens[0]}"):  # before the file of the verb, which imports it
            from revela.cli.recipe_flags import show_settings
    if not tokens or tokens[0] not in app:
        return
    verb = app[tokens[0]]
    verb.help = None  # the docstring in place of the summary
    if tokens[0] in TRAINING_VERBS:
        show_settings(verb.default_command, tokens)


def command_line() -> str:
    """The command of this process, to run it again."""
    return "revela " + shlex.join(sys.argv[1:])

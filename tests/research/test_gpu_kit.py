"""research/gpu: the stages at tiny size, the parts, and the table of their results."""

from __future__ import annotations

import json
import shutil
import subprocess
import zipfile
from types import SimpleNamespace

import pytest

from research.gpu import parts, run, stages, table
from revela.training.methods.registry import METHODS, PRESETS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What a run of all stages leaves, and a folder that outlives it. Stages after the first run in
    this process, which saves their imports.
    """
    home, begin = tmp_path_factory.mktemp("home"), subprocess.run
    given = ["--tiny", "--minutes", "10", "--home", str(home), "--build", str(home / "none")]

    def run_here(command, **settings):
        words = command[command.index(run.STAGES) + 1 :]
        if words[0] == "smoke":
            return begin(command, **settings)
        return SimpleNamespace(returncode=stages.main(words) or 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.subprocess, "run", run_here)
        run.main([*given, "--out", str(home / "out")])
    return home, given


def test_all_stages_run_on_a_cpu_and_none_is_repeated(results, capsys, monkeypatch):
    home, given = results
    records = table.read(home / "out")
    assert list(records) == list(stages.STAGES)
    for stage, record in records.items():
        notes = [row for row in record["rows"] if "note" in row]
        assert record["finished"] and record["rows"] and not notes, (stage, notes)
    monkeypatch.setattr(run, "run_stage", lambda *_: pytest.fail("repeated"))
    run.main([*given, "--out", str(home / "again")])
    assert capsys.readouterr().out.splitlines()[-1] == "missing: nothing"
    assert (home / "again" / "step.json").is_file()


def test_the_rows_have_what_is_measured(results):
    records = table.read(results[0] / "out")
    steps_of = [row["what"] for row in records["smoke"]["rows"] if "loss" in row]
    assert {f"a step of {preset}" for preset in PRESETS} >= {*steps_of}
    assert len(steps_of) == len(METHODS)
    for row in records["attention"]["rows"]:
        assert row["error"] <= row["tolerance"] and row["seconds"] > 0, row
    ours, bound = records["step"]["rows"][:2]
    assert bound["to_bound"] == 1 and ours["flops_of_a_group"] == bound["flops_of_a_group"] > 1e6
    (row,) = records["rows"]["rows"]
    assert row["what"] == "tiny, gated, seed 0" and row["steps"] == "2"
    assert (results[0] / "out" / "tiny-curves.csv").is_file()


def test_the_section_of_the_results_names_the_device_and_what_is_missing(results):
    records = table.read(results[0] / "out")
    text = table.section(records)
    assert "CPU, torch" in text and "tiny, gated, seed 0" in text and "Not measured" not in text
    for record in records.values():
        record["device"] = "NVIDIA H100 80GB HBM3"
    records["step"]["finished"] = False
    records["encode"]["rows"].append({"what": "encode, x", "note": "OutOfMemoryError: of. More"})
    text = table.section(records)
    assert "NVIDIA H100 80GB HBM3" in text and "before their last rows: step." in text
    assert "Not measured: encode, x (OutOfMemoryError: of)." in text and "% " in text
    assert table.NONE in table.section({})


def test_a_stage_that_fails_or_lacks_a_part_is_named_others_go_on(tmp_path, capsys, monkeypatch):
    began = []

    def run_stage(stage, seconds, results, a):
        began.append(stage)
        if stage == "step":
            return "ended with 1"
        rows = [{"what": "a"}, {"what": "b", "note": "no memory"}]
        (results / f"{stage}.json").write_text(json.dumps({"finished": True, "rows": rows}))
        return ""

    monkeypatch.setattr(run, "run_stage", run_stage)
    folders = {"home": tmp_path / "home", "build": tmp_path / "build", "out": tmp_path / "out"}
    run.main([word for name, path in folders.items() for word in (f"--{name}", str(path))])
    assert began == ["smoke", "attention", "step", "encode"]
    last = capsys.readouterr().out.splitlines()[-1]
    assert "step (ended with 1)" in last and "smoke (1 rows failed)" in last
    assert "rows (needs weights-1, weights-2, texts)" in last


def wheel(folder, name, text):
    """A wheel of one module."""
    about = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {text} (>=2)\n"
    kind = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr(f"{name}.py", f"TEXT = {text!r}\n")
        made.writestr(f"{about}/METADATA", metadata)
        made.writestr(f"{about}/WHEEL", kind)
        made.writestr(f"{about}/RECORD", "")
    return path


@pytest.fixture
def build(tmp_path):
    """The parts, with small wheels in place of the real ones."""
    folder = tmp_path / "build"
    wheel(folder / parts.WHEELS, "first_package", "numpy")
    model = wheel(tmp_path, "a_model", "weights").read_bytes()
    halves = zip(parts.WEIGHTS, (model[:99], model[99:]), strict=True)
    for number, (name, half) in enumerate(halves):
        (folder / name).mkdir()
        (folder / name / f"a_model-1.0-py3-none-any.whl.{number}").write_bytes(half)
    (folder / parts.TEXTS).mkdir()
    (folder / parts.TEXTS / parts.TEXT).write_text("{}")
    for name in parts.PARTS:
        parts.write_digests(folder / name)
    return folder


def test_parts_that_arrive_one_by_one_are_unpacked_and_joined(build, tmp_path):
    home, arrived = tmp_path / "home", tmp_path / "arrived"
    for name in parts.PARTS:
        shutil.rmtree(arrived, ignore_errors=True)
        shutil.copytree(build / name, arrived / name)
        assert parts.unpack(arrived, home) == []
        assert (home / name).is_dir()
        assert (home / "site" / "a_model.py").is_file() == (name in ("weights-2", "texts"))
    assert "weights" in (home / "site" / "a_model.py").read_text()
    assert (home / "site" / "first_package.py").is_file()
    assert str(home / "site") in parts.environment(home)["PYTHONPATH"]


def test_a_part_with_a_wrong_digest_is_named_and_the_others_are_unpacked(build, tmp_path):
    damaged = build / "weights-1" / "a_model-1.0-py3-none-any.whl.0"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    (build / parts.TEXTS / parts.DIGESTS).unlink()
    first, second = parts.unpack(build, tmp_path / "home")
    assert str(damaged) in first and "send it again" in first
    assert "texts is incomplete" in second
    assert (tmp_path / "home" / "site" / "first_package.py").is_file()
    assert not (tmp_path / "home" / "weights-1").exists()

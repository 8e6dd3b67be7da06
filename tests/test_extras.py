"""Without an extra, what needs it is an error that names the extra, or is skipped with a log line.

The extra code is tested with what it is for; train, hub and benchmarks in test_core.py.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from revela.encoders.embedded import _convert_gguf
from revela.encoders.graph_export import export_onnx
from revela.errors import RevelaError, extra

PYPROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]


@pytest.mark.parametrize(
    ("package", "use"),
    [
        ("onnxscript", lambda folder: export_onnx(None, folder / "out")),
        ("gguf", lambda folder: _convert_gguf(folder / "model.gguf", folder / "out")),
    ],
)
def test_a_missing_extra_is_one_sentence(tmp_path, monkeypatch, package, use):
    for module in [m for m in sys.modules if m.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    install = re.escape("run pip install '.[train]' in a checkout of revela")
    with pytest.raises(RevelaError, match=install) as found:
        use(tmp_path)
    assert package in str(found.value) and "\n" not in str(found.value)
    assert not list(tmp_path.iterdir())
    assert any(package in requirement for requirement in EXTRAS["train"])


def test_all_is_every_extra_of_a_user_and_dev_has_the_site_too():
    users = EXTRAS.keys() - {"all", "docs", "dev"}
    assert set(re.findall(r"\w+", EXTRAS["all"][0])) == users | {"revela", "retriever"}
    assert "revela-retriever[all,docs]" in EXTRAS["dev"]


def test_another_error_of_an_import_is_not_an_extra_that_is_missing():
    with pytest.raises(ImportError), extra("hub", "the hub"):
        from revela.errors import no_such_name  # noqa: F401

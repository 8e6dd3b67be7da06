"""Files with MS MARCO's columns become a folder that is scored on, trained on and probed."""

from __future__ import annotations

import gzip

import pytest

from research.msmarco_documents import main
from revela.evaluation.collection import load_collection
from revela.text.judgements import queries_by_id
from revela.training.probes.moved_passage import Answer, load_answers

FILES = {
    "documents": "D1\thttp://a\tSea\tIt is wide. The sea is SALT. It ends.\n"
    "D2\thttp://b\t\tA hill.\nD3\thttp://c\tC\tNobody asks.\nD4\thttp://d\tD\tNobody.\n",
    "dev-queries": "11\tis the sea salt\n",
    "dev-qrels": "11 0 D1 1\n",
    "train-queries": "21\twhat is high\n",
    "train-qrels": "21 0 D2 1\n21 0 D3 0\n",
    "passages": "0\tNo one.\n1\tThe sea is salt.\n2\tIt ends.\n",
    "passage-qrels": "11\t0\t2\t1\n11\t0\t1\t1\n99\t0\t0\t1\n",
}


def test_a_folder_is_made(tmp_path):
    flags = [f"--{name}={tmp_path / name}.gz" for name in FILES]
    for name, text in FILES.items():
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
    main([*flags, "--others", "1", "--out", str(tmp_path / "out")])
    found = load_collection(tmp_path / "out")
    assert (found.document_ids, found.qrels) == (["D1", "D2", "D3"], {"11": {"D1": 1}})
    assert queries_by_id([tmp_path / "out"]) == {"D2": {"what is high": None}}
    answer = Answer(0, "The sea is SALT.", ("is the sea salt",), len("Sea It is wide. "))
    assert load_answers(tmp_path / "out").answers == [answer]
    (tmp_path / "documents.gz").write_bytes(gzip.compress(b"D1\thttp://a\n"))
    with pytest.raises(SystemExit, match=r"documents\.gz:1 has 2 columns of 4"):
        main([*flags, "--out", str(tmp_path / "out")])

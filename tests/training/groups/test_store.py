"""ArrowList groups are what was given, in an order that the seed alone decides; a folder that is
not whole is refused.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain, islice
from pathlib import Path

import pytest

from revela.errors import RevelaError
from revela.text.spool import arrow_list
from revela.training.groups import store as shards
from revela.training.groups.store import GroupedCorpus, GroupFolder, is_group_folder, save_groups
from revela.training.groups.strategies import random_groups
from revela.training.recipe import Recipe
from revela.training.step import row_batches
from revela.training.training_set import TrainingSet
from revela.types import Chunk, Document

SIZE = 4


def saved(out: Path, count: int = 100) -> tuple[GroupFolder, list[list[int]]]:
    documents = arrow_list(
        Document, (Document(f"d{i}", "text", f"Title {i}" if i % 2 else "") for i in range(count))
    )
    rows = arrow_list(
        Chunk,
        (Chunk(i // SIZE, f"chunk {i} é", "why?" if i % 3 else "") for i in range(count * SIZE)),
    )
    groups = [list(range(i, i + SIZE)) for i in range(0, count * SIZE, SIZE)]
    groups = [g[::-1] for g in groups[1::2]] + groups[::2]  # not as they lie in the corpus
    held_out = [Document("held", "a text held out")]
    corpus = GroupedCorpus(documents, held_out, rows.select(range(count * SIZE)), groups)
    return save_groups(out, corpus, SIZE, {"seed": 0}), groups


@pytest.mark.parametrize(("count", "block"), [(100, 2**16), (100, 40), (1, 2**16), (5, 2**16)])
def test_what_is_stored_is_what_was_given(tmp_path, monkeypatch, count, block):
    monkeypatch.setattr(shards, "BLOCK", block)
    folder, groups = saved(tmp_path / "g", count)
    assert len(folder) == count and len(folder.rows) == count * SIZE
    found = [tuple(folder.members(range(i, i + SIZE))) for i in range(0, count * SIZE, SIZE)]
    given = [tuple(f"chunk {i} é" for i in sorted(group)) for group in groups]
    assert Counter(tuple(m.text for m in members) for members in found) == Counter(given)
    for member in folder.rows:
        number = int(member.text.split()[1])
        assert member.document == number // SIZE and member.query == ("why?" if number % 3 else "")
        assert member.name == (
            f"Title {member.document}" if member.document % 2 else f"d{member.document}"
        )
    assert [d.id for d in folder.documents] == [f"d{i}" for i in range(count)]
    assert [d.text for d in folder.held_out] == ["a text held out"]
    assert folder.settings == {"seed": 0}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_recipe_cuts_stored_groups_to_its_size_or_shuffles_their_chunks(tmp_path, size):
    folder, _ = saved(tmp_path / "g", 96)  # 16 shards of 6 groups
    folder.settings["documents"] = 96

    def groups_of(**settings):
        groups, number = TrainingSet(Recipe.of(**settings), folder).groups(None, tmp_path)
        found = list(groups(0))
        assert len(found) == number and sorted(chain(*found)) == list(range(96 * SIZE))
        return found

    cut = groups_of(group_size=size, seed=7, groups_per_batch=2)
    assert max(len({i // SIZE for i in group}) for group in cut) == (2 if size == 3 else 1)
    orders = [list(folder.order(seed, 2, size)(epoch)) for seed, epoch in ((7, 0), (7, 1), (8, 0))]
    assert cut == orders[0] and cut not in orders[1:] and any(g != sorted(g) for g in cut)
    shuffled = list(random_groups(96 * SIZE, size, 0))
    assert groups_of(group_size=size, groups="random") == shuffled
    with pytest.raises(RevelaError, match="has groups of 4: give --group-size 4"):
        groups_of(group_size=6)


@pytest.mark.parametrize("together", [1, 2])
def test_processes_share_one_order_and_each_reads_its_own_shards(tmp_path, together):
    folder, _ = saved(tmp_path / "g", 16 * 8)  # 16 shards of 8 groups
    batches = 128 // together

    def order():
        return islice(row_batches(folder.order(0, together), together), batches)

    whole = list(order())
    for processes in (1, 2, 4):
        mine = [list(islice(order(), i, None, processes)) for i in range(processes)]
        assert [batch for step in zip(*mine, strict=True) for batch in step] == whole
        read = [{row // (8 * SIZE) for batch in part for _, row in batch} for part in mine]
        assert sum(map(len, read)) == 16 == len(set().union(*read))


def cut_short(folder: Path) -> None:
    file = folder / "shard-03.arrow"
    file.write_bytes(file.read_bytes()[:-100])


def zeros(folder: Path) -> None:
    file = folder / "shard-03.arrow"
    file.write_bytes(b"\0" * file.stat().st_size)


def fewer_groups(folder: Path) -> None:
    file = folder / "groups.json"
    file.write_text(file.read_text().replace('"groups": 7', '"groups": 6', 1))


HARMS = [
    (cut_short, "shard-03.arrow has .* bytes of"),
    (zeros, "g is damaged"),
    (fewer_groups, "does not have the number of chunks in groups.json"),
    (lambda folder: (folder / "shard-00.arrow").unlink(), "g is damaged .*shard-00.arrow"),
    (lambda folder: (folder / "groups.json").unlink(), "g lacks groups.json"),
    (lambda folder: (folder / "groups.json").write_text("{"), "damaged"),
    (lambda folder: (folder / "groups.json").write_text('{"format": 1}'), "damaged"),
    (lambda folder: (folder / "groups.json").write_text('{"format": 99}'), "another version"),
    (lambda folder: (folder / "held-out.arrow").unlink(), "damaged"),
    (lambda folder: (folder / "documents.arrow").write_bytes(b""), "documents.arrow has chang"),
]


@pytest.mark.parametrize(("harm", "message"), HARMS)
def test_a_folder_that_is_not_whole_is_refused(tmp_path, harm, message):
    saved(tmp_path / "g")
    harm(tmp_path / "g")
    assert is_group_folder(tmp_path / "g")
    with pytest.raises(RevelaError, match=message) as error:
        GroupFolder(tmp_path / "g")
    assert "\n" not in str(error.value)


def test_a_changed_letter_is_found_on_request(tmp_path):
    folder, _ = saved(tmp_path / "g")
    folder.check()
    file = tmp_path / "g" / "shard-03.arrow"
    file.write_bytes(file.read_bytes().replace(b"chunk", b"CHUNK", 1))
    with pytest.raises(RevelaError, match=r"shard-03\.arrow has changed since it was written"):
        GroupFolder(tmp_path / "g").check()


def test_what_is_interrupted_leaves_nothing(tmp_path):
    documents = arrow_list(Document, [Document("a", "b")])
    rows = arrow_list(Chunk, [Chunk(0, str(i)) for i in range(40)])

    def dying():
        yield [0, 1, 2, 3]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        save_groups(tmp_path / "g", GroupedCorpus(documents, [], rows, dying()), 4, {})
    with pytest.raises(RevelaError, match="no group of 4 can be made of 40 chunks"):
        save_groups(tmp_path / "g", GroupedCorpus(documents, [], rows, []), 4, {})
    assert not list(tmp_path.iterdir())

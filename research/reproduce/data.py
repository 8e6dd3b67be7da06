"""Test collections of a table's columns: folders in BEIR layout, written from mteb's tasks where
there are none. A column may have several parts, whose mean is its score (CQADupstack, languages).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from research.reproduce.published import task_names
from revela.errors import RevelaError, extra, first_line
from revela.evaluation.collection import Collection, save_collection
from revela.files import atomic_write

Folders = dict[str, list[Path]]
"""Column -> the folders of its parts."""


def folders_in(data: Path) -> dict[str, list[Path]]:
    """Name in lower case -> the folder itself if it is a collection, or the collections in it."""
    found = dict[str, list[Path]]()
    for folder in sorted(data.iterdir()) if data.is_dir() else ():
        inside = [folder] if _is_collection(folder) else sorted(folder.glob("*"))
        if parts := [part for part in inside if _is_collection(part)]:
            found[folder.name.lower()] = parts
    return found


def find_folders(columns: Sequence[str], data: Path) -> Folders:
    """The folders of those columns that are there, by the column's name or that of mteb's task."""
    there, names = folders_in(data), task_names()
    found = {c: there.get(c.lower(), there.get(names.get(c, c).lower(), [])) for c in columns}
    return {column: folders for column, folders in found.items() if folders}


def make_folders(columns: Sequence[str], data: Path) -> Folders:
    """The folders of all columns that are there or can be had from mteb; says what is lacking.

    Raises:
        RevelaError: mteb cannot read a task.
    """
    found, names = find_folders(columns, data), task_names()
    missing = [column for column in columns if column not in found]
    tasks = find_tasks([names.get(column, column) for column in missing]) if missing else {}
    if lacking := [column for column in missing if names.get(column, column) not in tasks]:
        print(
            f"{', '.join(lacking)}: no folder in {data}, and no public task of mteb; these columns "
            "stay empty",
            flush=True,
        )
    for column in missing:
        if task := tasks.get(names.get(column, column)):
            found[column] = write_task(task, data / column)
    return {column: found[column] for column in columns if column in found}


def find_tasks(names: Sequence[str]) -> dict[str, Any]:
    """The public tasks of mteb among these names."""
    with extra("benchmarks", "test collections of mteb"):
        import mteb
    tasks = dict[str, Any]()
    for name in names:
        try:
            task = mteb.get_task(name)
        except KeyError:
            continue
        if task.metadata.is_public:
            tasks[name] = task
    return tasks


def write_task(task: Any, folder: Path) -> list[Path]:
    """Write the collections of a task, each as a folder in BEIR layout; returns them."""
    name = task.metadata.name
    print(f"{name}: written to {folder}", flush=True)
    try:
        parts = {
            f"{name}-{part}".lower(): split
            for one in getattr(task, "tasks", None) or [task]
            for part, split in _parts(one)
        }
        with atomic_write(folder) as temporary:
            for part, split in parts.items():
                save_collection(_collection(part, split), temporary / part)
    except Exception as error:  # mteb's, datasets', the hub's, HTTP's
        raise RevelaError(
            f"{name}: mteb cannot read its data ({first_line(error)}): run again with a network, "
            f"or make {folder} yourself, in BEIR layout"
        ) from error
    return [folder / part for part in sorted(parts)]


def _parts(task: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The judged splits of a task, each with a name. Of several languages English is taken, of
    several splits the one that has all.
    """
    task.load_data()
    subsets = {"en": task.dataset["en"]} if "en" in task.dataset else task.dataset
    for subset, splits in subsets.items():
        judged = [split for split in task.metadata.eval_splits if split in splits]
        for split in ["all"] if "all" in judged else judged:
            yield f"{task.metadata.name}-{subset}-{split}", splits[split]


def _collection(name: str, split: Mapping[str, Any]) -> Collection:
    """A split of mteb as a collection."""
    corpus, queries = split["corpus"], split["queries"]
    titles = corpus["title"] if "title" in corpus.column_names else [""] * len(corpus)
    texts = zip(titles, corpus["text"], strict=True)
    judged = split["relevant_docs"]
    ids = [query for query in queries["id"] if query in judged]
    text_of = dict(zip(queries["id"], queries["text"], strict=True))
    return Collection(
        name,
        document_ids=list(map(str, corpus["id"])),
        documents=[f"{title or ''} {text}".strip() for title, text in texts],
        query_ids=list(map(str, ids)),
        queries=[str(text_of[query]) for query in ids],
        qrels={str(query): {str(d): int(g) for d, g in judged[query].items()} for query in ids},
    )


def _is_collection(folder: Path) -> bool:
    return (folder / "qrels" / "test.tsv").is_file()

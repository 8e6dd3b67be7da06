"""Fuzzed inputs: each maker writes one into a folder, and returns the command that reads it."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from research.benchmarks.hardening.made import sentences


@dataclass(frozen=True)
class Sound:
    """Undamaged files, to read with or to copy and damage."""

    corpus: Path
    retriever: Path
    lm: Path
    index: Path
    groups: Path
    collection: Path


Maker = Callable[[random.Random, Path, Sound], list[str]]
ODD = [
    *(b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\\ud800", b"\\u0000", b"\r", b"\x1b]0;x\x07", b"\n\n"),
    *(b'"', b"'", b"{", b"}", b"[", b"]", b"<", b"&", b"]]>", b"-->", b"<!--", b"&#x110000;"),
    *(b"NaN", b"1e999", b"-0", b"9" * 400, b"null", b"true", b"\xef\xbb\xbf", b"\xc2\x85"),
]
QUERIES = ["--method", "dream-infonce", "--queries", "telling-sentence"]
SETTINGS = ["--group-size", "4", "--chunk-words", "12"]


def damaged(rng: random.Random, data: bytes) -> bytes:
    """The bytes with up to four faults."""
    for _ in range(rng.choice([0, 1, 1, 1, 2, 4])):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice([1, 4, 16, 300]))
        how = rng.randrange(7)
        if how == 0:
            changed = bytearray(data)
            for i in range(at, end):
                changed[i] ^= 1 << rng.randrange(8)
            data = bytes(changed)
        elif how == 1:
            data = data[:at]
        elif how == 2:
            data = data[:at] + rng.choice(ODD) * rng.choice([1, 1, 3, 5000]) + data[at:]
        elif how == 3:
            data = data[:at] + rng.randbytes(rng.choice([1, 8, 64])) + data[at:]
        elif how == 4:
            data = data[:end] + data[at:end] * rng.choice([1, 50]) + data[end:]
        elif how == 5:
            data = data[:at] + rng.choice([b"\0", b"\xff"]) * (end - at) + data[end:]
        else:
            data = data[:at] + data[end:]
    return data


def value(rng: random.Random, depth: int = 0) -> Any:
    """A value of JSON, mostly text."""
    kinds = [
        lambda: sentences(rng, rng.randint(1, 6)),
        lambda: rng.choice(
            ["", " ", "\0", "\ud800", "\x1b[2J", "=1+1", "../../x", "a\nb", "é" * 9]
        ),
        lambda: rng.choice([None, True, -1, 0.5, 2**70, float("nan"), float("inf"), -1e308]),
        lambda: "".join(chr(rng.randrange(0x20000)) for _ in range(20)),
        lambda: [value(rng, depth + 1) for _ in range(rng.randrange(4))],
        lambda: {str(value(rng, depth + 1))[:9]: value(rng, depth + 1) for _ in range(2)},
    ]
    weights = [12, 2, 1, 1, 1, 1] if depth < 3 else [12, 2, 1, 1, 0, 0]
    return rng.choices(kinds, weights)[0]()


def jsonl(rng: random.Random) -> bytes:
    names = ["text", "title", "_id", "year", "src", "query"]
    made = []
    for _ in range(rng.randrange(1, 12)):
        row = {name: value(rng) for name in names if rng.random() < 0.8}
        made.append(json.dumps(row, ensure_ascii=rng.random() < 0.5))
    if rng.random() < 0.1:
        deep = rng.choice([500, 5_000, 100_000])
        made.insert(rng.randrange(len(made)), rng.choice(['{"text":', "["]) * deep)
    return "\n".join(made).encode("utf-8", "surrogatepass")


def csv(rng: random.Random) -> bytes:
    mark = rng.choice([",", "\t", ";"])
    head = rng.choice([["text", "title"], ["text"], ["a", "text", "text"], ["title"], []])
    cell = lambda: rng.choice(['"', "", '""']) + sentences(rng, 1) + rng.choice(['"', "", "\n"])  # noqa: E731
    made = [mark.join(head)]
    made += [mark.join(cell() for _ in range(rng.randrange(4))) for _ in range(8)]
    return "\n".join(made).encode(rng.choice(["utf-8", "utf-16", "latin-1"]))


def table(rng: random.Random) -> Any:
    """An Arrow table, of texts and of columns of any type."""
    import pyarrow as pa

    count = rng.randrange(12)
    texts = pa.array([sentences(rng, 4) for _ in range(count)], pa.string())
    kinds = [
        texts, texts.dictionary_encode(), texts.cast(pa.large_string()), texts.cast(pa.binary()),
        pa.array([[s] for s in texts.to_pylist()], pa.list_(pa.string())),
        pa.array(range(count)), pa.nulls(count), pa.array([float("nan")] * count),
        pa.array([{"a": 1}] * count, pa.struct({"a": pa.int8()})), texts.cast(pa.string_view()),
        pa.array([rng.randbytes(8) for _ in range(count)], pa.binary()),
        pa.array(range(count), pa.timestamp("ns")), pa.array([10**20] * count, pa.decimal128(30)),
    ]  # fmt: skip
    names = rng.choice([["text"], ["text", "title"], ["text", "_id", "title", "year"], ["a"]])
    of_text = [texts, texts, *kinds]
    return pa.table({name: rng.choice(of_text if name == "text" else kinds) for name in names})


def parquet(rng: random.Random) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    form = rng.choice(["snappy", "none", "zstd", "gzip"])
    try:
        pq.write_table(table(rng), sink, compression=form, row_group_size=rng.choice([1, 5, 100]))
    except (pa.ArrowException, NotImplementedError):  # it has no such type
        pq.write_table(pa.table({"text": [sentences(rng, 4)] * 3}), sink)
    return sink.getvalue()


def arrow(rng: random.Random) -> bytes:
    import pyarrow as pa

    sink, made = io.BytesIO(), table(rng)
    new = rng.choice([pa.ipc.new_stream, pa.ipc.new_file])
    with new(sink, made.schema) as writer:
        writer.write_table(made)
    return sink.getvalue()


def html(rng: random.Random) -> bytes:
    names = ["unicode_escape", "undefined", "utf-16", "idna", "hex", "latin-1", "utf-8", "utf-7"]
    parts = [
        f'<html><head><meta charset="{rng.choice(names)}"><title>{sentences(rng, 1)}</title>',
        rng.choice(["<p>", "<div>", "<table><tr>", "<a href='x'>", "<svg>", "<b><i>"])
        * rng.choice([1, 3, 5_000, 100_000]),
        f"<!-- {sentences(rng, 1)} --><script>{sentences(rng, 1)}</script>",
        f"<p>{sentences(rng, 5)}&amp;&bogus;&#0;&#xd800;&#x7fffffff;</p>",
    ]
    rng.shuffle(parts)
    return "".join(parts).encode(rng.choice(["utf-8", "utf-16", "latin-1"]))


def pdf(rng: random.Random) -> bytes:
    texts = [sentences(rng, 3) for _ in range(rng.randrange(1, 4))]
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(texts)))
    parent = rng.choice(["", "", "", " /Parent 2 0 R"])  # a tree that holds itself
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Count {rng.choice([len(texts), -1, 10**9])} /Kids [{kids}]{parent} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for i, text in enumerate(texts):
        body = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET"
        font = "/Resources << /Font << /F1 3 0 R >> >>"
        objects.append(f"<< /Type /Page /Parent 2 0 R /Contents {5 + 2 * i} 0 R {font} >>")
        coded = rng.choice(["", "", "/Filter /FlateDecode", "/Filter /ASCII85Decode"])
        objects.append(f"<< /Length {len(body)} {coded} >>\nstream\n{body}\nendstream")
    out, places = "%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n"
    out += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n"
    start = out.index("xref")
    out += "".join(f"{place:010} 00000 n \n" for place in places)
    out += f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{start}\n%%EOF"
    return out.encode()


def text(rng: random.Random) -> bytes:
    made = [
        lambda: sentences(rng, 20),
        lambda: "def f(x):\n" + "    " * rng.choice([1, 500]) + f'"""{sentences(rng, 2)}"""\n',
        lambda: "(" * 5_000 + sentences(rng, 5),
        lambda: "".join(chr(rng.randrange(0xD800)) for _ in range(2000)),
        lambda: "# " * 3000 + sentences(rng, 3),
    ]
    return "\n".join(rng.choice(made)() for _ in range(3)).encode()


def bomb(rng: random.Random) -> tuple[str, bytes]:
    """A small file that unpacks to 100 MB."""
    many = 100_000_000
    heads = {".jsonl.gz": b'{"text": "', ".csv.gz": b"text\n", ".txt.gz": b"", ".html.gz": b"<p>"}
    name = rng.choice(list(heads))
    piece = rng.choice([b"a ", b"[", b"\0", b"<a>"])
    return name, gzip.compress(heads[name] + piece * (many // 3), 1)


FILES: dict[str, Callable[[random.Random], bytes]] = {
    **{".jsonl": jsonl, ".ndjson": jsonl, ".csv": csv, ".tsv": csv, ".parquet": parquet},
    **{".arrow": arrow, ".html": html, ".pdf": pdf, ".xml": html, ".txt": text, ".py": text},
}


def file(rng: random.Random, folder: Path) -> None:
    """A file of a corpus, maybe damaged or compressed, of any name."""
    if rng.random() < 0.004:
        name, data = bomb(rng)
    else:
        name = rng.choice(list(FILES))
        data = damaged(rng, FILES[name](rng))
        if rng.random() < 0.15:
            name, data = f"{name}.gz", gzip.compress(data)
            data = damaged(rng, data) if rng.random() < 0.5 else data
    odd = [b"a", b"a\nb", b"caf\xe9", b"\x1b[2J", b"a" * 200, "é".encode(), b"'; --", b"a b", b"-x"]
    place = rng.choice(odd) + str(rng.randrange(99)).encode() + name.encode()
    (folder / os.fsdecode(place)).write_bytes(data)


def strange(rng: random.Random, folder: Path) -> None:
    """Links, pipes, sockets and other entries of a folder that are no files."""
    how = rng.randrange(6)
    if how == 0:
        (folder / "loop").symlink_to(folder, target_is_directory=True)
        (folder / "self.txt").symlink_to(folder / "self.txt")
    elif how == 1:
        os.mkfifo(folder / rng.choice(["pipe.txt", "pipe.jsonl"]))
    elif how == 2:
        (folder / "away.txt").symlink_to("/etc/passwd")
        (folder / "device.txt").symlink_to("/dev/zero")
    elif how == 3:
        with socket.socket(socket.AF_UNIX) as made:
            here = Path.cwd()
            os.chdir(folder)  # the name of a socket is short
            made.bind("socket.txt")
            os.chdir(here)
    elif how == 4:
        (folder / "x.jsonl").mkdir()
    else:
        place = folder
        for _ in range(rng.choice([20, 300])):
            place /= "d"
        place.mkdir(parents=True)


def corpus(rng: random.Random, folder: Path, sound: Sound) -> list[str]:
    """A folder of one to four files, or one file by its name."""
    place = folder / "corpus"
    place.mkdir()
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        file(rng, place)
    if rng.random() < 0.15:
        strange(rng, place)
    found = [path for path in sorted(place.iterdir()) if not path.is_dir() and not path.is_fifo()]
    given = rng.choice(found) if found and rng.random() < 0.5 else place
    more: list[str] = []
    if rng.random() < 0.6:
        shutil.copy(sound.corpus, folder / "more.jsonl")
        more = [str(folder / "more.jsonl")]
    out = str(folder / rng.choice(["out", "out", "out", "caf\udce9", "a\nb"]))
    if rng.random() < 0.12:
        kept = rng.choice([[], ["--metadata", "year"], ["--metadata", "year", "title"]])
        made = ["index", str(given), *more, "--out", out]
        return [*made, "--model", str(sound.retriever), *kept]
    share = ["--max-bad-share", rng.choice(["1", "0.5", "0.01"])]
    near = rng.choice([[], [], ["--near-duplicates", "0.8"], ["--join-titles"]])
    kind = rng.choice([[], [], ["--groups", "random"], QUERIES])
    made = ["groups", str(given), *more, "--out", out, "--show", "1"]
    return [*made, *SETTINGS, *share, *near, *kind]


def recipe(rng: random.Random, folder: Path, sound: Sound) -> list[str]:
    """A TOML file of settings with values of any kind, and maybe damaged."""
    from revela.training.methods.registry import METHODS
    from revela.training.recipe import settings_of

    names = [name for method in METHODS.values() for name in settings_of(method)]
    odd = ["-1", "0", "1", "2", "64", "1e9", "nan", "inf", "-0.5", "0.3", "true", "[]", "[1, 2]"]
    odd += ["9223372036854775807", "99999999999999999999", '""', '"x"', "{}", "1979-05-27"]
    odd += [f'"{rng.choice(list(METHODS))}"', f'"{rng.choice(TEXTS)}"', '"\\u0000"', '"../x"']
    lines = [f"{rng.choice(names)} = {rng.choice(odd)}" for _ in range(rng.choice([1, 1, 1, 2, 5]))]
    if rng.random() < 0.2:
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(["[variants.a]", "[x]", "[[y]]"]))
    data = "\n".join(lines).encode()
    (folder / "recipe.toml").write_bytes(damaged(rng, data) if rng.random() < 0.3 else data)
    given = ["--recipe", str(folder / "recipe.toml")]
    if rng.random() < 0.75:
        return ["groups", str(sound.corpus), "--out", str(folder / "out"), *given]
    small = ["--model", str(sound.lm), "--lm", str(sound.lm), "--max-steps", "1", "--threads", "1"]
    small += ["--layers", "2", "--check-questions", "0", "--precision", "fp32"]
    return ["train", str(sound.corpus), "--out", str(folder / "out"), *small, *given, *SETTINGS]


TEXTS = ["title", "telling-sentence", "cluster", "mean", "eos", "best", "last", "cpu"]


def damage_folder(rng: random.Random, folder: Path) -> None:
    """Damage one file of a folder, or take it away, or put a folder in its place."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    sizes = [path.stat().st_size ** 0.3 + 1 for path in found]
    chosen = rng.choices(found, sizes)[0]
    how = rng.random()
    data = chosen.read_bytes()
    chosen.unlink()
    if how < 0.85:
        chosen.write_bytes(damaged(rng, data))
    elif how < 0.9:
        chosen.mkdir()


FILTERS = [
    *("year", "id", "title", "chunk", "nothing", "`year`", "year.x", "2020", "'a'", "null", "true"),
    *("+", "-", "*", "/", "%", "=", "!=", "<", ">=", "and", "or", "not", "is null", "like", "in"),
    *("(", ")", ",", "between", "case when", "then", "end", "cast(", "as int)", "repeat('a', 2)"),
    *("select", ";", "--", "'", '"', "\0", "é", "1e400", "99999999999999999999", "[1]", "::int"),
]


def where(rng: random.Random) -> str:
    """A filter of any words, or a deep one."""
    if rng.random() < 0.7:
        return " ".join(rng.choice(FILTERS) for _ in range(rng.choice([1, 3, 3, 8])))
    many = rng.choice([5, 60, 300, 1_000, 4_000])
    deep = [
        "year > 0" + "+1" * many, "(" * many + "year > 0" + ")" * many, "not " * many + "true",
        "year > 0" + " and year > 0" * many, "year > " + "-" * many + "1", "- " * many + "year > 0",
        "year in (" + "1," * many + "1)", "case when " * many, "[" * many, "year" + "::int" * many,
        "abs(" * many + "year" + ")" * many + " > 0", "year " + "is null " * many, "{" * many,
        "id like '" + "%a" * many + "'", "'a'" + " || id" * many + " = id", "array[" * many,
        "year > 0" + " or true" * many, "cast(" * many + "year", "a." * many + "b = 1",
    ]  # fmt: skip
    return rng.choice(deep)


def index(rng: random.Random, folder: Path, sound: Sound) -> list[str]:
    """An index with a damaged file, or a whole one and any filter."""
    place = sound.index
    filters: list[str] = []
    if rng.random() < 0.6:
        place = folder / "index"
        shutil.copytree(sound.index, place)
        damage_folder(rng, place)
        filters = rng.choice([[], ["--where", "year > 2000"]])
    else:
        filters = [f"--where={where(rng)}"]
    mode = rng.choice([[], ["--mode", "lexical"], ["--mode", "dense"], ["--fusion", "rank"]])
    if place != sound.index and rng.random() < 0.15:
        return ["index", str(sound.corpus), "--append", "--out", str(place)]
    query = rng.choice(
        ["ocean1 engine2", "", '"', "a AND", "\x1b", "\udcff", "x " * 3000, "ocean1"]
    )
    return ["search", str(place), query, *mode, *filters]


def model(rng: random.Random, folder: Path, sound: Sound) -> list[str]:
    """A retriever, or a language model, with a damaged file."""
    source = rng.choice([sound.retriever, sound.retriever, sound.lm])
    place = folder / "model"
    shutil.copytree(source, place)
    damage_folder(rng, place)
    if source == sound.lm:
        made = ["train", str(sound.groups), "--out", str(folder / "out"), "--max-steps", "1"]
        made += ["--lm", str(place), "--model", str(rng.choice([sound.lm, place]))]
        made += ["--layers", "2", "--threads", "1", "--precision", "fp32"]
        return [*made, "--gate-heads", "2"]
    if rng.random() < 0.5:
        return ["index", str(sound.corpus), "--out", str(folder / "out"), "--model", str(place)]
    return ["eval", str(place), "--on", str(sound.collection)]


def folders(rng: random.Random, folder: Path, sound: Sound) -> list[str]:
    """Groups, or a judged collection, with a damaged file."""
    if rng.random() < 0.5:
        shutil.copytree(sound.groups, folder / "groups")
        damage_folder(rng, folder / "groups")
        return ["groups", str(folder / "groups"), "--show", "2"]
    shutil.copytree(sound.collection, folder / "collection")
    damage_folder(rng, folder / "collection")
    return ["eval", str(sound.retriever), "--on", str(folder / "collection")]


MAKERS: dict[str, tuple[Maker, float]] = {
    "corpora": (corpus, 0.62),
    "recipes": (recipe, 0.14),
    "indices and filters": (index, 0.12),
    "models": (model, 0.05),
    "groups and collections": (folders, 0.07),
}


def made(seed: int, number: int, folder: Path, sound: Sound) -> tuple[str, list[str]]:
    """The input of a number: its kind, and the command line that reads it."""
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choices(list(MAKERS), [share for _, share in MAKERS.values()])[0]
    return kind, MAKERS[kind][0](rng, folder, sound)

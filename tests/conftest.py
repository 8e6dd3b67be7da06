"""Tiny random models and a small made-up corpus; no network, no weights."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from research.benchmarks.hardening.made import byte_tokenizer
from revela.encoders import load
from revela.encoders.base import TextEncoder
from revela.types import Document
from tests.collection_folder import write_lines

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)

settings.register_profile("revela", deadline=None)  # a busy machine is not a failure
settings.load_profile("revela")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-records", action="store_true", help="write tests/records.json again")


# They take about a minute each. Begun first, with --no-loadscope-reorder, they leave no worker
# waiting for another at the end.
LONGEST = (
    *("training/test_processes.py", "searching/test_every_write.py", "training/test_train.py"),
    *("research/test_gpu_kit.py", "research/test_pretend_gpu.py", "test_pages.py", "test_cli.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = [Path(__file__).parent / name for name in LONGEST]
    items.sort(key=lambda item: order.index(item.path) if item.path in order else len(order))


@pytest.fixture(autouse=True)
def quiet_again():
    """The command line prints what is logged; a test after one that calls it is as before it."""
    log = logging.getLogger("revela")
    level, handlers = log.level, list(log.handlers)
    yield
    log.setLevel(level)
    log.handlers[:] = handlers


KEEP_GRAPH = load.keep_graph
SHARED = Path(__file__).parents[2] / "shared"
SENTENCE = "A sentence that has more than five words."
TOPICS = [
    *("ocean", "engine", "garden", "planet", "market", "violin", "enzyme", "castle", "glacier"),
    *("circuit", "recipe", "harbour"),
]
TINY_SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4)

# Settings of a run of seconds on the tiny models.
TINY: dict[str, Any] = dict(
    layers=2, chunk_words=12, group_size=8, groups_per_step=1, lora_rank=4, lora_alpha=8,
    lm_tokens=64, max_tokens=64, max_minutes=0, max_steps=6, warmup_steps=2, log_every=1,
    check_every=0, threads=1, precision="fp32",
)  # fmt: skip


def sentence(topic: str, rng: random.Random) -> str:
    words = [f"{topic}{rng.randrange(6)}" for _ in range(rng.randint(5, 9))]
    return " ".join(words).capitalize() + "."


def make_rows(count: int, sentences: int = 8, seed: int = 0) -> list[dict[str, str]]:
    """Documents that each keep to one topic's words, so that siblings share words and strangers do
    not.
    """
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        topic = f"{TOPICS[i % len(TOPICS)]}{i // len(TOPICS)}"
        text = " ".join(sentence(topic, rng) for _ in range(sentences))
        rows.append({"_id": f"d{i}", "title": f"About the {topic} and more", "text": text})
    return rows


def make_documents(count: int, **how: int) -> list[Document]:
    """The same as documents."""
    return [Document(row["_id"], row["text"], row["title"]) for row in make_rows(count, **how)]


def write_texts(folder: Path, rows: list[dict[str, str]]) -> Path:
    """Write the texts of rows as files, by number."""
    folder.mkdir()
    for i, row in enumerate(rows):
        (folder / f"{i}.txt").write_text(row["text"])
    return folder


def logged(run: Path, what: str = "loss") -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl that have this."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if what in row]


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", make_rows(80))


@pytest.fixture(scope="session")
def tiny_tokenizer():
    return byte_tokenizer([row["text"] for row in make_rows(80)])


def tiny_config(kind: str, vocabulary: int = 400):
    """Configurations of the families that must be carried: grouped-query heads wherever the family
    has them.
    """
    import transformers as t

    common = TINY_SIZES | dict(vocab_size=vocabulary, max_position_embeddings=2048)
    gqa = dict(num_key_value_heads=2, head_dim=8)
    ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return {
        "llama": lambda: t.LlamaConfig(**common, **gqa, **ids),
        "qwen2": lambda: t.Qwen2Config(**common, num_key_value_heads=2, **ids),
        "qwen3": lambda: t.Qwen3Config(**common, **gqa, **ids),
        "mistral": lambda: t.MistralConfig(**common, **gqa, **ids, sliding_window=None),
        "gemma3": lambda: t.Gemma3TextConfig(
            **common, **gqa, **ids, sliding_window=64, query_pre_attn_scalar=8
        ),
        "gpt_neox": lambda: t.GPTNeoXConfig(**common, **ids),
    }[kind]()


def frozen_llama():
    """A tiny random Llama in fp64, with the same weights at every call."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config("llama")).double().eval().requires_grad_(False)


class MadeUpEncoder(TextEncoder):
    """An encoder without a model; a test gives it ``encode_queries`` and ``encode_passages``."""

    def encode_batch(self, features, role, with_tokens):
        raise NotImplementedError


class Embed(torch.nn.Module):
    """Like a ``RetrieverModule``, of one table, the same every time."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.table, self.width = torch.nn.Embedding(400, 8), None

    def pool(self, features):
        return self.table(features["input_ids"]).mean(1)

    def forward(self, features):
        return torch.nn.functional.normalize(self.pool(features)[:, : self.width], dim=1)

    @contextlib.contextmanager
    def evaluating(self):
        training = self.training
        self.eval()
        yield
        self.train(training)


def build_context(recipe, *given, **named):
    """What a method is built from, with the sections of this recipe."""
    from revela.training.methods.base import BuildContext

    names = "groups", "queries", "retriever", "context", "lm", "training"
    return BuildContext(*(getattr(recipe, name) for name in names), *given, **named)


def train_by_sgd(loss_module, features, steps: int, rate: float) -> list[float]:
    """The losses of so many steps on one batch."""
    optimizer, losses = torch.optim.SGD(loss_module.parameters(), lr=rate), []
    for _ in range(steps):
        loss = loss_module(features)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="session")
def tiny_lm_folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer) -> Path:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny-llama")
    LlamaForCausalLM(tiny_config("llama", len(tiny_tokenizer))).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def models(tiny_lm_folder: Path) -> str:
    """Flags of a training verb: the tiny model as retriever and as language model."""
    return f"--model {tiny_lm_folder} --lm {tiny_lm_folder}"


@pytest.fixture(scope="session")
def tiny_bert_folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer) -> Path:
    """A Sentence-Transformers folder of a random BERT, with [CLS] and [SEP] around every text."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules
    from tokenizers.processors import TemplateProcessing
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny-bert")
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.mask_token = "<s>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    sizes = TINY_SIZES | dict(
        vocab_size=len(tokenizer), num_hidden_layers=3, max_position_embeddings=64
    )
    config = BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    BertModel(config, add_pooling_layer=False).save_pretrained(folder / "bert")
    tokenizer.save_pretrained(folder / "bert")
    transformer = modules.Transformer(str(folder / "bert"), max_seq_length=40)
    parts = [transformer, modules.Pooling(32, pooling_mode="mean"), modules.Normalize()]
    SentenceTransformer(modules=parts).save_pretrained(str(folder / "st"))
    return folder / "st"


def tiny_retriever(folder: Path, **changes):
    """A new retriever from a language model, of two layers."""
    from revela.training.retriever.build import build_retriever
    from revela.training.settings import Retriever

    settings = dict(layers=2, pooling="mean", max_tokens=64, lower_case="no")
    settings |= dict(query_prompt="query: ", passage_prompt="passage: ")
    return build_retriever(folder, Retriever(**{**settings, **changes}))


@pytest.fixture(scope="session")
def saved_retriever(tmp_path_factory: pytest.TempPathFactory, tiny_lm_folder: Path) -> Path:
    """The folder of a tiny retriever with all that a fit adds: token weights, the lexical half,
    whitening.
    """
    from revela.training.retriever.fit import fit_to_corpus
    from revela.training.retriever.module import RetrieverModule
    from revela.training.retriever.save import save_retriever
    from revela.training.settings import Fit

    folder = tmp_path_factory.mktemp("saved-retriever")
    model = tiny_retriever(tiny_lm_folder, max_tokens=100, lower_case="yes")
    fit_to_corpus(RetrieverModule(model), [row["text"] for row in make_rows(30)], Fit())
    save_retriever(model, folder, "")
    return folder


SLOTS = 8


@pytest.fixture(scope="session")
def contextual(tmp_path_factory: pytest.TempPathFactory, tiny_lm_folder: Path) -> Path:
    """The folder of a tiny retriever with slots, untrained but with a first stage that says
    something, and the context of eight documents.
    """
    from revela.training.retriever.context import SavedContext, add_context
    from revela.training.retriever.save import save_retriever
    from revela.training.settings import Context

    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("contextual") / "model"
    model = tiny_retriever(tiny_lm_folder, max_tokens=100)
    texts = [row["text"] for row in make_rows(40, sentences=2)[::5]]
    first = add_context(Context(SLOTS), model, texts[0], 0)
    assert first is not None
    for weight in (list(first.model)[-1].linear.weight, first.null_D):
        torch.nn.init.normal_(weight, std=0.3)
    save_retriever(model, folder, "", context=SavedContext(first, first.of_texts(texts), {}))
    return folder


def live(folder):
    """A saved retriever as training holds it, with its first stage if it has one."""
    from revela.encoders.torch_model import open_model
    from revela.training.retriever.context import load_context_encoder
    from revela.training.retriever.module import RetrieverEncoder

    model = open_model(folder, device="cpu")
    first = load_context_encoder(folder)
    return RetrieverEncoder(model, False, None if first is None else first.of_texts)


@pytest.fixture(scope="session")
def static_folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer) -> Path:
    """The folder of a static retriever, which needs no torch."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    folder = tmp_path_factory.mktemp("static") / "model"
    tokenizer = copy.deepcopy(tiny_tokenizer.backend_tokenizer)  # others truncate by theirs
    tokenizer.no_truncation()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        table = StaticEmbedding(tokenizer, embedding_dim=8)
    SentenceTransformer(modules=[table]).save(str(folder))
    return folder


@pytest.fixture(scope="session")
def documents(corpus_file: Path):
    from revela.text.load import read_corpus

    return read_corpus([corpus_file])[0]


def wait_for(is_so) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextlib.contextmanager
def serving(*arguments: object, env: Mapping[str, str]):
    """Run revela in a process that serves. Gives the process, the line that it prints when it
    listens, and the address in it.
    """
    command, pipe = [sys.executable, "-m", "revela", *map(str, arguments)], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env) as process:
        try:
            line = next(line for line in process.stdout if line.startswith("serving "))
            yield process, line, re.findall(r"http://[^\s;]+", line)[0]
        finally:
            process.kill()


@pytest.fixture
def reads(tmp_path):
    """Writes files, by name, and reads all of their folder; gives the documents and the report."""
    from revela.text.load import read_corpus

    def read(files, **how):
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            raw = content if isinstance(content, bytes) else content.encode()
            (tmp_path / name).write_bytes(raw)
        return read_corpus([tmp_path], **how)

    return read


def parsed(command: list[str]) -> tuple[str, dict[str, Any]]:
    """The name of a command's function, and the arguments that it is given."""
    from revela import cli
    from revela.cli.main import prepare

    prepare(command)
    function, bound, _ = cli.app.parse_args(command, exit_on_error=False, print_error=False)
    return function.__name__, bound.arguments


@pytest.fixture
def doing(monkeypatch, capsys):
    """Runs a command line; gives its exit code, stdout and stderr. A string may hold several flags
    with their values: "--top 3 --json".
    """
    from revela import cli

    def run(*arguments: object) -> tuple[int, str, str]:
        flags = [str(a).split() if str(a).startswith("--") else [str(a)] for a in arguments]
        monkeypatch.setattr(sys, "argv", ["revela", *chain.from_iterable(flags)])
        monkeypatch.setattr(cli.app, "config", cli.app.config)
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


@pytest.fixture
def succeeds(doing):
    """Runs a command line that ends well; gives its stdout."""

    def run(*arguments: object) -> str:
        code, out, err = doing(*arguments)
        assert code == 0, err
        return out

    return run


@pytest.fixture
def refused(doing):
    """Runs a command line that is refused; gives the one sentence that says why."""

    def run(*arguments: object) -> str:
        code, _, err = doing(*arguments)
        said = [line for line in err.splitlines() if line.strip() and "%|" not in line]  # no bars
        assert code == 2 and len(said) == 1 and said[0].startswith("revela: "), err
        return f"{said[0]}\n"

    return run


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of a comparison run in this process, which saves the imports of each."""
    from revela.cli import app
    from revela.cli.main import prepare

    def run_here(command):
        prepare([*command.words])
        app([*command.words], exit_on_error=False, print_error=False, result_action="return_value")

    monkeypatch.setattr("revela.training.commands.Command.run", run_here)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory):
    """A cache of the session's own, and no exports of retrievers, which take seconds each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REVELA_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        patch.setattr(load, "keep_graph", lambda folder, even_with_gpu=False: None)
        yield


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """With this, a retriever without a graph is exported to one, as it is for users."""
    monkeypatch.setattr(load, "keep_graph", KEEP_GRAPH)


@pytest.fixture(scope="session")
def taught_lm_folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer) -> Path:
    """A tiny Llama taught for some seconds on documents of one topic each, so that it uses what it
    has read before.
    """
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    config = tiny_config("llama", len(tiny_tokenizer))
    config.hidden_size, config.intermediate_size = 64, 128
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rng = random.Random(1)
    for _ in range(150):
        texts = []
        for _ in range(16):
            topic = f"{rng.choice(TOPICS)}{rng.randrange(7)}"
            texts.append(" ".join(sentence(topic, rng) for _ in range(3)))
        how = dict(padding=True, truncation=True, max_length=120)
        batch = tiny_tokenizer(texts, return_tensors="pt", **how)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("taught-llama")
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder

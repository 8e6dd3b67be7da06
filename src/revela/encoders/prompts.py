"""Prompts: the prefixes that an embedder reads before a query, and before a passage.

They come from the user; else from the model's folder (config_sentence_transformers.json); else from
``KNOWN``, which also has the pooling of published retrievers without modules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from revela.encoders.model_files import hub_name, read_config
from revela.errors import RevelaError


class Prompts(NamedTuple):
    """The prompts of a model; "" for none."""

    query: str = ""
    passage: str = ""

    @classmethod
    def named(cls, prompts: Mapping[str, str | None]) -> Prompts:
        """The prompts of a dict by name, looked up as in sentence-transformers."""
        passages = (prompts.get(name) for name in ("document", "passage", "corpus"))
        return cls(prompts.get("query") or "", next(filter(None, passages), ""))

    def replaced(self, given: GivenPrompts) -> Prompts:
        """The given prompts; None keeps this one's."""
        query, passage = given
        return Prompts(
            self.query if query is None else query, self.passage if passage is None else passage
        )

    def by_name(self) -> dict[str, str]:
        """The prompts as sentence-transformers stores them; both names of passages are in use."""
        return {"query": self.query, "document": self.passage, "passage": self.passage}

    def describe(self) -> str:
        """A line for the user."""
        return f"prompts: {self.query!r} before queries, {self.passage!r} before passages"


GivenPrompts = tuple[str | None, str | None]
"""The user's prompts of queries and of passages; None: the model's own."""
OWN: GivenPrompts = (None, None)
AUTO = "auto"  # in a recipe: the model's own prompt


def prompts_set(query: str, passage: str) -> GivenPrompts:
    """A recipe's prompts, where "auto" is the model's own, as ``GivenPrompts``."""
    return (None if query == AUTO else query), (None if passage == AUTO else passage)


E5 = Prompts("query: ", "passage: ")
TWO_SPACES = Prompts("query:  ", "passage:  ")
DECODER = E5  # for a retriever made from a language model, as in Revela
BGE = Prompts("Represent this sentence for searching relevant passages: ")
BGE_ZH = Prompts("为这个句子生成表示以用于检索相关文章：")
E5_MISTRAL = Prompts(
    "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
)
NOMIC = Prompts("search_query: ", "search_document: ")
RURI = Prompts("クエリ: ", "文章: ")


class Known(NamedTuple):
    """What the folder of a published model does not say.

    Attributes:
        prompts: used if its folder names none.
        pooling: as ``--pooling``, or "cls"; "": its folder has modules. "eos" also appends the EOS
            for modules that pool the last token.
        max_tokens: of a text, prompt and special tokens included, if its folder has no modules.
        similarity: as ``--similarity``, if its folder has no modules.
    """

    prompts: Prompts = Prompts()
    pooling: str = ""
    max_tokens: int = 512
    similarity: str = "cosine"


# By patterns of the last part of a model's name. None of these models needs remote code.
KNOWN = {
    # Prompts: mteb 2.26, get_model_meta(NAME).loader_kwargs["model_prompts"].
    r"(multilingual-)?e5-(small|base|large)(-v2)?|USER-base": Known(E5),
    r"bge-(small|base|large)-en(-v1\.5)?": Known(BGE),
    r"bge-(small|base|large)-zh(-v1\.5)?": Known(BGE_ZH),
    r"nomic-embed-text-v1(\.5)?|modernbert-embed-base|ru-en-RoSBERTa": Known(NOMIC),
    r"ruri-(base|large)": Known(RURI),
    # https://huggingface.co/intfloat/e5-large-unsupervised
    r"e5-(small|base|large)-unsupervised": Known(E5),
    # https://huggingface.co/intfloat/e5-mistral-7b-instruct: its example of a search. Its EOS
    # (add_eos_token) is not read by transformers 5; so says mteb 2.26, e5_instruct.py.
    r"e5-mistral-7b-instruct": Known(E5_MISTRAL, "eos"),
    # https://github.com/TRUMANCFY/mteb, mteb/models/repllama_models.py, with which the paper's
    # scores were measured: two spaces, where training had one.
    r"(?i:Revela-(code-)?(135M|500M|1b|3b|8b))": Known(TWO_SPACES, "eos", 2048),
    # https://huggingface.co/castorini/repllama-v1-7b-lora-passage; 512 tokens:
    # https://github.com/texttron/tevatron, examples/example_repllama.md.
    r"repllama-v1-7b-lora-passage": Known(E5, "eos"),
    # mteb 2.26, models/model_implementations/repllama_models.py.
    r"RepLLaMA-reproduced": Known(TWO_SPACES, "eos"),
    # https://huggingface.co/yixuantt/DREAM-3B: the last token of a text, without a prompt.
    r"DREAM-(0\.5B|1B|3B|8B)": Known(pooling="last"),
    # https://huggingface.co/facebook/contriever; dot products: arXiv 2112.09118, section 3.
    r"m?contriever(-msmarco)?": Known(pooling="mean", similarity="dot"),
    # https://github.com/staoxiao/RetroMAE, examples/retriever/BEIR/README.md.
    r"RetroMAE(_BEIR)?": Known(pooling="cls", similarity="dot"),
    # https://github.com/JetRunner/LaPraDoR: scored by BEIR's SentenceBERT, whose default is the
    # mean, and by cosines.
    r"laprador": Known(pooling="mean"),
}


def prompts_of(folder: Path, given: GivenPrompts = OWN) -> Prompts:
    """The prompts to use with the model in a folder."""
    named = named_prompts(folder)
    return (named if any(named) else known_of(folder).prompts).replaced(given)


def known_of(folder: Path) -> Known:
    """The entry of ``KNOWN`` for the model in a folder."""
    name = hub_name(folder).rpartition("/")[2]
    found = (known for pattern, known in KNOWN.items() if re.fullmatch(pattern, name))
    return next(found, Known())


def named_prompts(folder: Path) -> Prompts:
    """The prompts in a folder's own configuration.

    ``default_prompt_name`` is ignored, as in ``encode_query`` and ``encode_document`` of
    sentence-transformers.
    """
    prompts = read_config(folder).get("prompts")
    return Prompts.named(prompts if isinstance(prompts, dict) else {})


def check_prompts(made: Prompts, given: GivenPrompts, what: Path) -> None:
    """Raise RevelaError if the given prompts differ from those that ``what`` was made with."""
    if made.replaced(given) != made:
        raise RevelaError(
            f"{what} was made with the prompts {made.query!r} and {made.passage!r}: leave "
            "--query-prompt and --passage-prompt out, or make a new one"
        )


def read_prompts(folder: Path) -> Prompts:
    """The prompts of a folder of judged queries, from its prompts.json if there is one."""
    path = folder / "prompts.json"
    try:
        text = path.read_bytes() if path.is_file() else b"{}"
        return TypeAdapter(Prompts).validate_json(text, strict=True)
    except ValueError as error:
        raise RevelaError(
            f'{path} is not {{"query": "...", "passage": "..."}}: give each a text, or leave it out'
        ) from error

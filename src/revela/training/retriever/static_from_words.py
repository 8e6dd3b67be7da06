"""Make a static retriever from a language model and raw text: a row per word, no layer is run.

    row(stem) = sqrt(idf(stem)) * whiten(mean over its words of mean over their pieces of E(piece))

E are the LM's input embeddings. The words of the corpus become the tokens of a new tokenizer; words
of one stem share a row. Whitening over the corpus (fit.py) makes unlike words nearly
orthogonal, so that a word that query and passage share adds its idf to their dot product, as in
BM25. Where words are not spaced, and in Hangul, the LM's pieces are the words; they also stand in
for words that the corpus does not have. training/word_table.py trains the rows.

Shapes: N texts, T tokens of a text, V tokens, S stems, P pieces of the LM, U pieces in use, D
numbers of a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from revela.encoders.static_encoder import StaticEncoder, token_ids
from revela.errors import RevelaError
from revela.ranking.bm25 import idf
from revela.training.retriever.fit import WORDS_TO_VECTORS, whitening_of

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

MAX_WORDS = 100_000  # the most frequent ones of the corpus
UNKNOWN = "<unk>"

Terms = Callable[[str], list[str]]
"""Finds the stems of a text."""


@dataclass(frozen=True)
class WordTable:
    """A tokenizer of words, the stem of each token, and a unit row and a weight of each stem.

    The tokenizer is of the ``tokenizers`` library. Its token 0 is for unknown characters and has
    stem -1.
    """

    tokenizer: Any
    stem_V: NDArray[np.int64]
    rows_SD: Tensor
    weight_S: Tensor

    def stems(self, texts: Sequence[str]) -> Iterator[NDArray[np.int64]]:
        """The stems of each text, (T,), in order."""
        for ids in token_ids(self.tokenizer, texts):
            stems_T = self.stem_V[np.array(ids, np.int64)]
            yield stems_T[stems_T >= 0]

    def rows_VD(self) -> Tensor:
        """Each token's row in fp16: its stem's, times the stem's weight."""
        rows_SD = F.pad(self.rows_SD * self.weight_S[:, None], (0, 0, 0, 1))
        return rows_SD[torch.from_numpy(self.stem_V)].half()  # stem -1 is the last row: 0

    def encoder(self) -> StaticEncoder:
        """The retriever for encoding."""
        encoder = StaticEncoder(self.rows_VD().numpy(), self.tokenizer)
        encoder.words_to_vectors = WORDS_TO_VECTORS
        return encoder

    def model(self) -> SentenceTransformer:
        """The retriever for saving."""
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer import modules

        static = modules.StaticEmbedding(self.tokenizer, embedding_weights=self.rows_VD())
        parts = [static, modules.Normalize()]
        return SentenceTransformer(modules=parts, similarity_fn_name="cosine")


def build_word_table(lm: Path, texts: Sequence[str], terms: Terms) -> WordTable:
    """Make a table of the words of texts.

    Args:
        lm: folder of a language model, whose tokenizer and input embeddings are read.
        texts: the corpus, or a part of it.
        terms: gives the stem of a word; nothing for a stop word, which is its own stem; several for
            a run of characters whose words are not spaced.

    Raises:
        RevelaError: the model has no fast tokenizer or no weights in safetensors, or the texts have
            fewer than two words.
    """
    from tokenizers import models

    lm_tokenizer, tokenizer = _lm_tokenizer(lm), _word_tokenizer(texts)
    counts = _word_counts(tokenizer, texts)
    spaced, pieces, ids_of_piece = dict[str, str](), Counter[str](), dict[str, list[int]]()
    for word, count in counts.most_common():
        stems = terms(word)
        if len(stems) <= 1 and len(spaced) < MAX_WORDS:
            spaced[word] = stems[0] if stems else f" {word}"  # no stem begins with a space
        for piece, ids in _pieces(lm_tokenizer, word):
            pieces[piece] += count
            ids_of_piece.setdefault(piece, ids)
    if len(spaced) + len(pieces) < 2:
        raise RevelaError("the texts have fewer than two words: give text to fit a table to")
    # A piece that is a word of the corpus is that word.
    stem_of = {**{piece: f"  {piece}" for piece in pieces}, **spaced}
    number = {stem: i for i, stem in enumerate(dict.fromkeys(stem_of.values()))}
    stem_V = np.array([-1, *(number[stem] for stem in stem_of.values())], np.int64)
    # Equally likely tokens, so that a word is split into as few of them as possible.
    scores = [(UNKNOWN, -2.0), *((token, -1.0) for token in stem_of)]
    tokenizer.model = models.Unigram(scores, unk_id=0)
    pieces_of = [
        lm_tokenizer.encode(f" {token}", add_special_tokens=False).ids
        if token in spaced
        else ids_of_piece[token]
        for token in stem_of
    ]
    counts_V = [max(counts[token], 0 if token in spaced else pieces[token]) for token in stem_of]
    rows_SD = _mean_rows(
        _input_embeddings(lm), pieces_of, stem_V[1:], np.array(counts_V), len(number)
    )
    table = WordTable(tokenizer, stem_V, rows_SD, torch.ones(len(number)))
    count_S, texts_S = stem_frequencies(table, texts)
    # No text has pieces of words as tokens: their weight is by how often they occur in words.
    in_words_S = np.bincount(stem_V[1:], weights=counts_V, minlength=len(number))
    texts_S = np.where(texts_S > 0, texts_S, np.minimum(in_words_S, len(texts)))
    return replace(
        table,
        weight_S=idf_weights(texts_S, len(texts)),
        rows_SD=whitening_of(rows_SD, torch.from_numpy(count_S))(rows_SD).float(),
    )


def _word_tokenizer(texts: Sequence[str]) -> Any:
    """A tokenizer of lower-case words, with the words of the texts as its vocabulary."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordLevel({UNKNOWN: 0}, UNKNOWN))
    lower = normalizers.BertNormalizer(handle_chinese_chars=False, strip_accents=False)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), lower])
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordLevelTrainer(
        vocab_size=10 * MAX_WORDS, special_tokens=[UNKNOWN], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _word_counts(tokenizer: Any, texts: Sequence[str]) -> Counter[str]:
    """The count of each word with letters or digits."""
    counts_V = np.zeros(tokenizer.get_vocab_size(), np.int64)
    for ids in token_ids(tokenizer, texts):
        np.add.at(counts_V, ids, 1)
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return Counter({w: int(counts_V[i]) for w, i in words if i and any(map(str.isalnum, w))})


def stem_frequencies(
    table: WordTable, texts: Sequence[str]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The count of each stem, and the number of texts that hold it; (S,) both."""
    count_S, texts_S = np.zeros(len(table.rows_SD)), np.zeros(len(table.rows_SD))
    for stems_T in table.stems(texts):
        stems, counts = np.unique(stems_T, return_counts=True)
        count_S[stems] += counts
        texts_S[stems] += 1
    return count_S, texts_S


def idf_weights(texts_S: NDArray[np.float64], total: int) -> Tensor:
    """sqrt(idf), 1 in the mean."""
    root_S = np.sqrt(np.maximum(idf(texts_S, total), 0))
    return torch.from_numpy(root_S / root_S.mean()).float()


def _pieces(lm_tokenizer: Any, word: str) -> Iterator[tuple[str, list[int]]]:
    """The pieces of whole characters that an LM splits a word into, and their tokens."""
    encoding = lm_tokenizer.encode(word, add_special_tokens=False)
    piece_start, piece_end, ids = 0, 0, list[int]()
    for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        if start >= piece_end and ids:
            yield word[piece_start:piece_end], ids
            piece_start, ids = start, []
        piece_end = max(piece_end, end)
        ids.append(token)
    if ids:
        yield word[piece_start:piece_end], ids


def _mean_rows(
    embeddings_PD: Tensor,
    ids: Sequence[Sequence[int]],
    stem_V: NDArray[np.int64],
    counts_V: NDArray[np.int64],
    stems: int,
) -> Tensor:
    """The mean of each stem's words, weighted by their counts; a word is the mean of the unit
    embeddings of its pieces; (S, D).
    """
    sizes_V = np.array([len(pieces) for pieces in ids])
    used, place = np.unique(np.concatenate([*ids, []]).astype(np.int64), return_inverse=True)
    used_U, last = torch.from_numpy(used), len(embeddings_PD) - 1
    unit_UD = F.normalize(embeddings_PD[used_U.clamp(max=last)].float(), dim=1)
    unit_UD[used_U > last] = 0  # a token without a row (encoders/torch_model.py: add_missing_rows)
    share_V = np.maximum(counts_V, 1) / np.maximum(sizes_V, 1)
    stem_of_piece = np.repeat(stem_V, sizes_V)
    order = np.argsort(stem_of_piece, kind="stable")
    starts_S = torch.from_numpy(np.searchsorted(stem_of_piece[order], np.arange(stems)))
    share = torch.from_numpy(np.repeat(share_V, sizes_V)[order]).float()
    places = torch.from_numpy(place[order])
    return F.embedding_bag(places, unit_UD, starts_S, mode="sum", per_sample_weights=share)


def _lm_tokenizer(lm: Path) -> Any:
    """A language model's tokenizer, of the ``tokenizers`` library."""
    from tokenizers import Tokenizer

    file = lm / "tokenizer.json"
    if not file.is_file():
        raise RevelaError(
            f"{lm} has no tokenizer.json, which a table of words needs: give another --model"
        )
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _input_embeddings(lm: Path) -> Tensor:
    """The input embeddings of a language model, (P, D); its layers are not read."""
    from accelerate import init_empty_weights
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModel

    with init_empty_weights():
        model = AutoModel.from_config(AutoConfig.from_pretrained(lm))
    table = model.get_input_embeddings().weight
    (name,) = (name for name, parameter in model.named_parameters() if parameter is table)
    for file in sorted(lm.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for stored in opened.keys():  # noqa: SIM118 (not a dict)
                if stored == name or stored.endswith(f".{name}"):
                    embeddings_PD: Tensor = opened.get_tensor(stored)
                    return embeddings_PD
    raise RevelaError(f"{lm} has no {name} in safetensors: give another --model")

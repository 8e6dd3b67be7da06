# %% [markdown]
# # Compare on public benchmarks
#
# BM25 and MiniLM on a task of mteb, whose data is downloaded: each alone, fused by rank (RRF) as
# mteb does it, and fused by Revela's rule, which is calibrated on the task's corpus without labels.
#
# `Hybrid` is the rule in mteb's search protocol, around any dense encoder of mteb. It ranks the
# first 200 documents by words and by vectors, and holds the vectors of a corpus in memory.

# %%
from itertools import islice

import mteb
import torch
import torch.nn.functional as F
from datasets import Dataset
from mteb._create_dataloaders import create_dataloader
from mteb.models.hybrid_wrappers import HybridSearch
from mteb.types import PromptType
from torch.utils.data import DataLoader

from revela.encoders.base import Encoded, TextEncoder
from revela.evaluation.collection import Collection
from revela.evaluation.evaluate import store_of
from revela.evaluation.mteb import MtebEncoder
from revela.ranking import exact
from revela.ranking.fusion import DEPTH


class Hybrid(TextEncoder):
    """BM25 and an encoder's cosines, fused as in ``revela eval``."""

    def __init__(self, encoder):
        self.encoder = encoder
        own = {"name": f"hybrid/{encoder.mteb_model_meta.name.replace('/', '-')}"}
        self.mteb_model_meta = encoder.mteb_model_meta.model_copy(update=own)

    def index(self, corpus, *, task_metadata, hf_split, hf_subset, encode_kwargs, **_):
        """Encode a corpus, count its words, and calibrate the fusion of both."""
        part = {"task_metadata": task_metadata, "hf_split": hf_split, "hf_subset": hf_subset}
        self.settings = {**part, **encode_kwargs}
        self.ids, documents = corpus["id"], self.texts(corpus, PromptType.document)
        titles = corpus["title"] if "title" in corpus.column_names else [""] * len(documents)
        collection = Collection(task_metadata.name, self.ids, documents, [], [], {}, titles=titles)
        self.store = store_of(collection, self)

    def search(self, queries, *, top_k: int, **_):
        """The first ``top_k`` documents of each query and their scores, best first."""
        texts = self.texts(queries, PromptType.query)
        vectors = self.encode_queries(texts)
        run = {}
        for query, text, vector in zip(queries["id"], texts, vectors, strict=True):
            (near,) = exact.rankings_of(*exact.top_k(vector[None], self.store.vectors_ND, DEPTH))
            words = self.store.bm25.rankings([text], DEPTH)
            (scores,) = self.store.rankings([text], [vector], [near], words)
            run[query] = {self.ids[row]: score for row, score in islice(scores.items(), top_k)}
        return run

    def texts(self, rows, prompt_type):
        """Documents with their titles, or queries with their instructions, as mteb reads them."""
        how = {"task_metadata": self.settings["task_metadata"], "prompt_type": prompt_type}
        return list(create_dataloader(rows, **how).dataset["text"])

    def encode_batch(self, features, role, with_tokens):
        kind = PromptType.query if role == "query" else PromptType.document
        return Encoded(self.encode(features["texts"], kind))

    def encode(self, texts, prompt_type):
        inputs = DataLoader(Dataset.from_dict({"text": list(texts)}), batch_size=32)
        vectors = self.encoder.encode(inputs, prompt_type=prompt_type, **self.settings)
        return F.normalize(torch.as_tensor(vectors).float().cpu(), dim=1).numpy()


task = mteb.get_task("NanoSciFactRetrieval")  # or NFCorpus, FiQA2018 and others
minilm = MtebEncoder.load("embedded:minilm-l6")  # or any of mteb.get_model
bm25 = mteb.get_model("mteb/baseline-bm25s")
systems = {
    "BM25 of mteb": bm25,
    "MiniLM": minilm,
    "RRF of both": HybridSearch([bm25, minilm]),
    "Revela": Hybrid(minilm),
}

# %% [markdown]
# nDCG@10, mteb's main score of retrieval. RRF has mteb's BM25 and Revela its own, so that a
# difference is of both the words and the rule; `revela eval` has RRF with the same BM25.

# %%
scores = {}
for name, system in systems.items():
    (result,) = mteb.evaluate(system, task, cache=None, show_progress_bar=False).task_results
    scores[name] = result.get_score()
    print(f"{name:12} {scores[name]:.3f}")

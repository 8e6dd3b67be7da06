# %% [markdown]
# # Compare on public benchmarks
#
# BM25 and MiniLM on a task of mteb, whose data is downloaded: each alone, fused by rank (RRF) as
# mteb does it, and fused by Revela's rule, which measures on the task's corpus, without labels, how
# well words and vectors know it.

# %%
import mteb
from mteb.models.hybrid_wrappers import HybridSearch

from revela.evaluation.mteb import MtebEncoder
from revela.evaluation.mteb_hybrid import MtebHybrid

task = mteb.get_task("NanoSciFactRetrieval")  # or NFCorpus, FiQA2018 and others
minilm = MtebEncoder.load("embedded:minilm-l6")  # or any of mteb.get_model
bm25 = mteb.get_model("mteb/baseline-bm25s")
systems = {
    "BM25 of mteb": bm25,
    "MiniLM": minilm,
    "RRF of both": HybridSearch([bm25, minilm]),
    "Revela": MtebHybrid(minilm),
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

# %% [markdown]
# # Text, retriever, search
#
# Train a retriever on raw text, compare it with BM25, and search with it. The text is the reference
# of the Python language, which comes with every Python: 79 documents. For your own text, give a
# folder to `train`. This takes some minutes and writes to `runs/`.

# %%
from pydoc_data.topics import topics

from sentence_transformers import SentenceTransformer

from revela import Document, LabelFreeEvaluator, Retriever, train

documents = [Document(name, text, name) for name, text in topics.items()]
held_out = documents[::4]
rest = [document for document in documents if document not in held_out]

# %% [markdown]
# The retriever starts from the six lower layers of a language model, fitted to the text without
# labels or gradient steps. Then another copy of that model teaches it which chunks belong together.

# %%
SMOLLM2 = "embedded:smollm2-135m"
result = train(rest, "runs/text-retriever", model=SMOLLM2, lm=SMOLLM2, max_minutes=3)
print(result)

# %% [markdown]
# Queries come from the held-out documents: the first half of a chunk should find the rest of its
# document, and a title its document. nDCG@10 of the retriever, alone and fused with BM25, and of
# BM25.

# %%
evaluator = LabelFreeEvaluator(held_out)
scores = evaluator(SentenceTransformer(str(result.path)))
for task, score in scores.items():
    print(f"{task:32} {score:.3f}")
print({f"BM25, {task}": round(score, 3) for task, score in evaluator.bm25.items()})

# %% [markdown]
# An index of all documents. It keeps the vectors of single tokens, so that re-ranking by them takes
# milliseconds.

# %%
index = Retriever(result.path).index(documents, "runs/text-index", keep_tokens=True)
hits = index.search("how do I catch an exception", k=5, rerank="late-interaction")
for hit in hits:
    print(f"{hit.score:.3f}  {hit.id}  {hit.text[:80]!r}")

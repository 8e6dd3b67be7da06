# %% [markdown]
# # Adapt an embedder
#
# Adapt MiniLM to raw text, and check whether that helps. The text is the reference of the Python
# language, which comes with every Python; held-out documents give the queries.

# %%
from pydoc_data.topics import topics

from sentence_transformers import SentenceTransformer

from revela import Document, LabelFreeEvaluator, Retriever, train

documents = [Document(name, text, name) for name, text in topics.items()]
held_out = documents[::4]
rest = [document for document in documents if document not in held_out]

# %% [markdown]
# A frozen language model reads groups of chunks and teaches MiniLM which of them help to predict
# others. `keep="last"` saves the result of training, so that it can be compared here. Without it,
# `train` holds documents out by itself, and saves the embedder unchanged unless training helped.

# %%
result = train(
    rest,
    "runs/adapted",
    model="embedded:minilm-l6",
    lm="embedded:smollm2-135m",
    keep="last",
    max_minutes=3,
)
print(result)

# %% [markdown]
# nDCG@10 before and after, by the vectors alone and fused with BM25. With so few documents a
# difference below 0.02 can be chance.

# %%
evaluator = LabelFreeEvaluator(held_out)
before = evaluator(SentenceTransformer(str(Retriever("embedded:minilm-l6").folder)))
after = evaluator(SentenceTransformer(str(result.path)))
for task in before:
    print(f"{task:32} {before[task]:.3f} -> {after[task]:.3f}")
mean = evaluator.primary_metric
print("adapted wins" if after[mean] > before[mean] + 0.005 else "keep the embedder as it was")

"""What judged queries add to a start without labels, and to an embedder: nDCG@10 on the test
queries of a collection that has training queries too.

    python -m research.benchmarks.judged --data COLLECTIONS/scifact --out FOLDER --threads 2

Each start is trained on qrels/train.tsv with mined negatives, by preset ``pairs``, once per seed,
and the last state is saved: the label-free check is not asked. The starts are MiniLM and
SmolLM2-135M's six lower layers, fitted to the corpus. Runs that are in FOLDER are not made again;
then ``revela eval`` scores all of them.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

STARTS = {"minilm": "embedded:minilm-l6", "smollm2": "embedded:smollm2-135m"}
TRAINED = (
    *("--preset", "pairs", "--negatives", "2", "--group-size", "16", "--keep", "last"),
    *("--max-minutes", "0", "--check-every", "0", "--held-out", "0", "--near-duplicates", "0"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="in BEIR layout, with qrels/train.tsv")
    add("--out", type=Path, required=True)
    add("--starts", nargs="*", choices=STARTS, default=list(STARTS))
    add("--seeds", nargs="*", type=int, default=[0, 1, 2])
    add("--steps", type=int, default=100)
    add("--train-tokens", type=int, default=128)
    add("--threads", type=int, default=1)
    a = parser.parse_args()
    corpus = next(a.data.glob("corpus.jsonl*"))
    models = []
    for name in a.starts:
        # As it starts: a language model is fitted to the corpus, an embedder is as it is.
        runs = {f"{name}-start": ("--max-steps", "1", "--learning-rate", "0")}
        runs |= {
            f"{name}-{seed}": ("--max-steps", str(a.steps), "--seed", str(seed)) for seed in a.seeds
        }
        for run, flags in runs.items():
            models.append(str(a.out / run))
            if (a.out / run / "modules.json").is_file():
                continue
            given = [str(corpus), "--pairs", str(a.data), "--model", STARTS[name], *TRAINED, *flags]
            given += ["--train-tokens", str(a.train_tokens), "--out", models[-1]]
            given += ["--threads", str(a.threads)]
            subprocess.run(["revela", "train", *given], check=True)
    scored = ["--on", str(a.data), "--json", str(a.out / "judged.json")]
    subprocess.run(["revela", "eval", *models, *scored], check=True)


if __name__ == "__main__":
    main()

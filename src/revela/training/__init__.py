"""Train a retriever: train.py shows every step of a run, step.py reads batches and takes steps.

The other modules: check_settings.py refuses settings, negatives.py mines hard negatives, checks.py
scores the retriever and keeps its best state, record.py has run.json and metrics.jsonl,
checkpoint.py has the output folder, saves and resumes, outcome.py saves the retriever,
distributed.py lets several processes train one. word_table.py trains a table of words, without a
method. on_files.py does all of it for a corpus in files.
"""

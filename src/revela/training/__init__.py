"""Train a retriever: train.py shows every step of a run, step.py reads batches and takes steps.

The other modules: check_settings.py refuses settings, negatives.py mines hard negatives, checks.py
scores the retriever and keeps its best state, metrics.py has the budget and metrics.jsonl,
checkpoint.py saves and resumes, record.py has the output folder and run.json, outcome.py saves the
retriever, processes.py compares processes. word_table.py trains a table of words, without a method.
train_on_files.py does all of it for a corpus in files.
"""

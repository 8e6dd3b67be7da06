"""Training: train.py shows every step of a run; loop.py reads batches and takes steps;
metrics.py has budget, metrics.jsonl and checks; checkpoint.py saves and resumes; record.py has the
output folder and run.json; refusals.py says which settings cannot work; negatives.py mines.
train_table.py trains a table of words, without objectives.
"""

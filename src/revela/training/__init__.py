"""Training: run.py opens, starts, optimises and finishes a run; loop.py takes the steps;
checkpoint.py saves and resumes; progress.py has clock, metrics, checks and plot; record.py writes
run.json.
"""

"""Training: run.py puts the pieces together, trainer.py saves and resumes, watch.py is what a person sees."""

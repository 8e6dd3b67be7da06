"""Training: run.py is one run of a recipe; rows.py says what groups are made of, heads.py which of
an LM's heads are used, objectives.py and collate.py what each objective needs; trainer.py saves and
resumes, watch.py is what a person sees.
"""

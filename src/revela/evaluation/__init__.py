"""Evaluation of rankings: on judged collections (evaluate.py), on held-out documents without
labels (label_free.py), and on public benchmarks (mteb.py).
"""

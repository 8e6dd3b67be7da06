"""Encode texts as unit vectors, without torch if possible.

load.py opens a model folder: as a table of words (static_encoder.py), as a graph (graphs.py,
graph_encoder.py), else by torch (torch_encoder.py). base.py has their base class.
"""

"""Texts -> unit vectors, without torch where it can be.

load.py opens a model folder: as a table of words (static_encoder.py), as a graph (graphs.py,
graph_encoder.py), else by torch (torch_encoder.py). base.py is the class of all of them.
"""

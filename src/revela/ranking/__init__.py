"""Two rankings -> one: what a search and an evaluation share.

steps.py has the steps, bm25.py and exact.py the two rankings, fusion.py joins them,
late_interaction.py re-ranks. sentence_test.py tests both on a text without labels, by queries that
queries.py takes from it, and calibration.py has what follows: the fusion's rule, and how sure a hit
is.
"""

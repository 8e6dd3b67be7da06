"""Where in a text a model looks, and how its vectors lie: probe.py runs what the other files
measure.
"""

"""Queries that authors or a language model wrote for a text."""

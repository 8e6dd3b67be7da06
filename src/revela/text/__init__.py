"""Files -> documents -> chunks, and the words that BM25 counts.

readers/ has a reader per format; load.py reads a corpus, chunk.py cuts it, dedupe.py drops
near-duplicates. analyzer.py splits passages and queries into terms, by language.
"""

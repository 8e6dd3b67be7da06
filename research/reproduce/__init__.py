"""Tables and figures of the papers, each by one command: ``python -m research.reproduce``."""

"""Training queries: taken from the text, or written by a language model."""

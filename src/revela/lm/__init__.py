"""The teacher: an LM run as two streams, with what is mixed in between and what it is asked."""

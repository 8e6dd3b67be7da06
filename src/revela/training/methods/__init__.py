"""The objectives, one per file; training/settings/objectives.py lists them."""

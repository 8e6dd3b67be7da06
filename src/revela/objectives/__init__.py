"""The objectives, one per file; settings/objectives.py lists them."""

"""What a retriever learns from, a file each; settings/objectives.py has the list."""

"""The methods, one file each: settings, presets, batches and loss. registry.py names them."""

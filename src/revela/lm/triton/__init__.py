"""Triton kernels, kept apart until a GPU has shown whether they are worth their lines: no GPU has
been measured. ``--kernel triton`` takes them.
"""

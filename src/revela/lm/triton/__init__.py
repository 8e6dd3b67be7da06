"""Triton kernels, for ``--kernel triton``. Their speed on a GPU has not been measured."""

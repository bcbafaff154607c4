"""Triton kernels, each beside its plain-torch reference (`*_ref.py`)."""

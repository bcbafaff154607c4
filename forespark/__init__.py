"""ForeSpark: joint draft and verification scheduling for parallel speculative decoding in vLLM."""

__version__ = "0.1.0"

"""The variable-length packed drafter (vLLM adapter)."""

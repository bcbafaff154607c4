"""The verification budget distributor (vLLM adapter)."""

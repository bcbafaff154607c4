"""Gated DeltaNet targets in vLLM without a recurrent state per drafted token.

vLLM 0.32 keeps one full state for every drafted token of a request and refuses verification of
unequal lengths on these layers. Here a layer keeps one state and the compact factors of the draft
(`forespark.triton_kernels.gdn_verify`), and the accepted state is rebuilt after sampling, before
the drafter runs (`forespark.triton_kernels.gdn_commit`).
"""

"""CUDA graphs of the packed drafter: context keys and values, backbone, heads.

Three small graphs instead of one, each keyed by the one size it depends on: rows of the target's
step, packed rows D + n, drafted rows D. Every combination of loads and draft lengths is then a
replay, and the LM head never runs on anchors. The attention metadata of the backbone is refreshed
inside its graph from the lengths that `pack` left on the device.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from forespark.drafter.batch import capture_attention, packed_attention
from forespark.drafter.graph_memory import free_bytes, on_every_rank, say_fewer
from forespark.scheduler.buckets import bucket_sizes, thinned

logger = logging.getLogger("vllm.forespark")
SMALLEST_GRAPH = 1 << 20  # bytes one more graph takes at least, whatever was measured


class BucketGraphs(CudaGraphManager):
    """vLLM's graph manager over a list of sizes: one graph a size, the smallest that fits runs."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, sizes: Iterable[int]) -> None:
        self.sizes = sorted(sizes)  # the base class asks for descriptors at once
        super().__init__(vllm_config, device, CUDAGraphMode.FULL_DECODE_ONLY, decode_query_len=1)

    def _init_candidates(self) -> None:
        self._by_size = {
            size: BatchExecutionDescriptor(
                CUDAGraphMode.FULL, num_tokens=size, num_reqs=min(size, self.max_num_reqs)
            )
            for size in self.sizes
        }
        self._capture_only(self.sizes)

    def _capture_only(self, sizes: Iterable[int]) -> None:
        """The next capture is of these sizes, largest first: the others fit into its memory."""
        descs = [self._by_size[size] for size in sorted(sizes, reverse=True)]
        self._capture_descs = {CUDAGraphMode.FULL: descs}

    def bucket(self, size: int) -> int | None:
        """The smallest captured size >= `size`; None where nothing is captured."""
        at = bisect.bisect_left(self.sizes, size)
        return self.sizes[at] if self._graphs_captured and at < len(self.sizes) else None

    def replay(self, bucket: int) -> None:
        """Run the graph of a size that `bucket` returned."""
        self.run_fullgraph(self._by_size[bucket])

    def capture_each(
        self, prepare: Callable[[int, int], Callable[[], None]], name: str, share: float = 1.0
    ) -> None:
        """Capture what `prepare(size, num_reqs)` returns; `prepare` itself stays outside.

        `share` of the free memory may be used. The largest and the smallest size come first: they
        tell what one more graph takes. Where that is too much for all sizes, a selection is
        captured and a warning says what it costs.
        """

        def create(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:
            assert desc.num_reqs is not None
            run = prepare(desc.num_tokens, desc.num_reqs)
            return lambda _mode: run()

        def capture(sizes: Iterable[int]) -> None:
            self._capture_only(sizes)
            super(BucketGraphs, self).capture(create, f"Capturing ForeSpark {name} CUDA graphs")

        every, free = self.sizes, share * free_bytes(self.device)
        if on_every_rank(free) <= 0:
            self.sizes = []
            say_fewer(name, every, [], 0, 0)
            return
        ends = sorted({every[0], every[-1]})
        self._capture_mem_samples = samples = []
        capture(ends)
        self._capture_mem_samples = None
        each = max(samples[-1], SMALLEST_GRAPH)
        free = max(0.0, share * free_bytes(self.device))
        self.sizes = thinned(every, len(ends) + on_every_rank(free / each))
        if len(self.sizes) < len(every):
            say_fewer(name, every, self.sizes, each, free)
        rest = sorted(set(self.sizes) - set(ends))
        if rest:
            capture(rest)


def capturable_rows(speculator: Any, cudagraph_mode: CUDAGraphMode) -> int:
    """Largest size to capture; 0 = run the drafter eagerly (said once, with what works)."""
    if cudagraph_mode.decode_mode() != CUDAGraphMode.FULL:
        return 0
    support = speculator.attn_cg_support
    if support.min_cg_support.value < AttentionCGSupport.ALWAYS.value:
        logger.warning(
            "attention_backend: %s cannot capture drafts of different lengths, so the drafter runs "
            "eagerly; FLASH_ATTN (FlashAttention 3) and TRITON_ATTN can",
            support.min_cg_attn_backend,
        )
        return 0
    return int(speculator.vllm_config.compilation_config.max_cudagraph_capture_size or 0)


class DrafterGraphs:
    """The three sets of graphs of one speculator, which owns the managers as attributes.

    vLLM's memory profiling captures into a throw-away pool and then drops every graph manager it
    finds on the speculator: `fresh` makes new ones.
    """

    def __init__(self, speculator: Any) -> None:
        self._speculator = speculator
        self._hidden: torch.Tensor | None = None  # the backbone's outputs by packed row

    def fresh(self, largest: int) -> None:
        """New, empty managers for sizes up to `largest`; none for 0."""
        spec = self._speculator
        spec.context_graphs = spec.backbone_graphs = spec.head_graphs = None
        if largest <= 0:
            return
        width = spec.num_query_per_req
        most = min(largest, spec.max_num_tokens, spec.max_num_reqs * width)
        sizes = bucket_sizes(most)
        spec.context_graphs = BucketGraphs(spec.vllm_config, spec.device, sizes)
        spec.backbone_graphs = BucketGraphs(spec.vllm_config, spec.device, sizes[1:])
        drafted = bucket_sizes(min(most, spec.max_num_reqs * spec.num_speculative_steps))
        spec.head_graphs = BucketGraphs(spec.vllm_config, spec.device, drafted)

    def capture(self) -> None:
        """Capture everything; buffers are left so that a capture writes to no live request."""
        spec = self._speculator
        if spec.backbone_graphs is None:
            return
        spec.packed.row_offset.zero_()
        spec.packed.sample_row.zero_()
        spec.packed.sample_step.zero_()
        spec.packed.sample_slot.fill_(-1)
        spec.packed.sample_start.zero_()
        spec._context_slot_mappings.fill_(PAD_SLOT_ID)
        # Each set may take an equal part of the memory, and what the ones before left of theirs.
        spec.context_graphs.capture_each(self._context, "context", share=1 / 3)
        spec.backbone_graphs.capture_each(self._backbone, "backbone", share=1 / 2)
        if spec.backbone_graphs.sizes:
            spec.head_graphs.capture_each(self._heads, "head")
        else:  # they read what a captured backbone leaves behind
            spec.head_graphs.sizes = []

    def context(self, num_tokens: int) -> None:
        """Keys and values of every accepted row, drafted from or not."""
        spec = self._speculator
        graphs = spec.context_graphs
        bucket = None if graphs is None else graphs.bucket(num_tokens)
        if bucket is None:
            spec._precompute_context_kv(0, num_tokens)
            return
        spec._context_slot_mappings[:, num_tokens:bucket].fill_(PAD_SLOT_ID)
        graphs.replay(bucket)

    def backbone(self, input_batch: Any, rows_total: int) -> torch.Tensor:
        """Outputs [>= D + n, H] of the packed rows."""
        spec = self._speculator
        graphs = spec.backbone_graphs
        bucket = None if graphs is None else graphs.bucket(rows_total)
        if bucket is None:
            return spec.run_packed(rows_total, packed_attention(spec, input_batch, rows_total))
        if not spec.supports_decode_metadata_update:
            # The backend's own persistent buffers are filled by building the metadata.
            packed_attention(spec, input_batch, rows_total)
        graphs.replay(bucket)
        assert self._hidden is not None
        return self._hidden

    def heads(self, hidden: torch.Tensor, drafted: int, num_reqs: int) -> None:
        """Tokens and acceptance logits of the D drafted rows."""
        spec = self._speculator
        graphs = spec.head_graphs
        bucket = None if graphs is None else graphs.bucket(drafted)
        if bucket is None:
            spec.heads.run(hidden, drafted, num_reqs)
            return
        if hidden is not self._hidden:  # the backbone ran eagerly
            assert self._hidden is not None
            self._hidden[: hidden.shape[0]].copy_(hidden)
        graphs.replay(bucket)

    def _context(self, size: int, num_reqs: int) -> Callable[[], None]:
        spec = self._speculator
        return lambda: spec._precompute_context_kv(0, size)

    def _backbone(self, size: int, num_reqs: int) -> Callable[[], None]:
        spec = self._speculator
        metadata, slot_mappings = capture_attention(spec, num_reqs, size)

        def run() -> None:
            if spec.supports_decode_metadata_update:
                spec._update_draft_decode_metadata(metadata, num_reqs)
            hidden = spec.run_packed(size, metadata, slot_mappings)
            if self._hidden is None:  # in the first warm-up run, which is the largest size's
                self._hidden = torch.zeros(
                    spec.max_num_tokens, hidden.shape[1], dtype=hidden.dtype, device=hidden.device
                )
            self._hidden[:size].copy_(hidden)

        return run

    def _heads(self, size: int, num_reqs: int) -> Callable[[], None]:
        spec = self._speculator
        hidden = self._hidden
        assert hidden is not None
        return lambda: spec.heads.run(hidden, size, spec.max_num_reqs)

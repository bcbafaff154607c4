"""Rank 0 decides for its tensor-parallel group: what may differ between ranks is taken from it.

Ranks compute the same sums in their own order, with kernels tuned on their own; a last bit that
differs would be another plan, another token and a hang. One step sends up to three messages on the
current stream, none of which the host waits for: what the verification kept, the pre-draft scores
(with rank 0's clock), and the drafted tokens with their survival.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

WORD = torch.int32  # four bytes: a token id, a count, or the bits of a float32


def pack_words(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """int32 [sum of sizes]: float32 as its bits, integers by value (they must fit 32 bits)."""
    return torch.cat([_words(tensor).flatten() for tensor in tensors])


def unpack_words(message: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Write what `pack_words` of the same shapes and types packed into `tensors`."""
    parts = message.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        if tensor.dtype is torch.float32:
            part = part.view(torch.float32)
        tensor.copy_(part.view(tensor.shape))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype is torch.float32:
        return tensor.contiguous().view(WORD)
    if tensor.dtype in (torch.int32, torch.int64):
        return tensor.to(WORD)
    raise TypeError(f"message between ranks: {tensor.dtype} is neither float32, int32 nor int64")


class Ranks:
    """A tensor-parallel group (vLLM's GroupCoordinator) seen from one of its ranks."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.several = group.world_size > 1
        self.leads = group.rank_in_group == 0

    def follow(self, *tensors: torch.Tensor) -> None:
        """Overwrite `tensors` with rank 0's in one message; without other ranks nothing happens.

        float32, int32 or int64 whose values fit 32 bits; shapes are the same on every rank.
        """
        if not self.several:
            return
        message = pack_words(tensors)
        self._broadcast(message)
        if not self.leads:
            unpack_words(message, tensors)

    def _broadcast(self, message: torch.Tensor) -> None:
        # vLLM's own NCCL communicator runs on the current stream, like the all-reduces around it.
        nccl = getattr(self._group.device_communicator, "pynccl_comm", None)
        if nccl is not None and not nccl.disabled:
            nccl.broadcast(message, 0)
        else:
            self._group.broadcast(message, 0)

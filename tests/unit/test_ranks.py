"""What ranks tell each other: messages that keep every bit, and one line when they cannot agree."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="the adapter needs vLLM")

from forespark.config import ForeSparkConfig
from forespark.core import LatencyTable
from forespark.drafter.ranks import Ranks, pack_words, unpack_words
from forespark.verifier.agreement import disagreement, parts_of

CONFIG = ForeSparkConfig.from_any({"method": "forespark", "model": "drafter"})
TABLE = LatencyTable(np.array([1, 8, 64]), np.array([1.0, 2.0, 9.0]), 64)


class Group:
    """Two ranks of which this is one; `sent` is what rank 0 broadcast."""

    def __init__(self, rank: int, size: int = 2, sent: torch.Tensor | None = None) -> None:
        self.rank_in_group, self.world_size, self.sent = rank, size, sent
        self.device_communicator = None
        self.messages = 0

    def broadcast(self, message: torch.Tensor, source: int) -> None:
        assert source == 0
        self.messages += 1
        if self.rank_in_group == 0:
            self.sent = message.clone()
        else:
            assert self.sent is not None
            message.copy_(self.sent)


def step(seed: int) -> list[torch.Tensor]:
    """Tokens (a view with gaps between its rows), survival with extremes, and a count each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(-1, 2**31 - 1, (5, 9), generator=generator)[:, :7]
    survival = torch.rand(5, 7, generator=generator)
    survival[0, 0], survival[1, 1], survival[2, 2] = -math.inf, math.nan, -0.0
    return [tokens, survival, torch.randint(0, 9, (5,), generator=generator, dtype=torch.int32)]


def bits(tensors: list[torch.Tensor]) -> list[bytes]:
    return [tensor.contiguous().numpy().tobytes() for tensor in tensors]


def test_messages_keep_every_bit() -> None:
    """Catches a float that passes through a rounding, and rows written past a view's own."""
    source, target = step(1), step(2)
    whole = target[0]._base
    assert whole is not None
    outside = whole[:, 7:].clone()
    message = pack_words(source)
    assert message.dtype == torch.int32 and message.shape == (5 * 7 + 5 * 7 + 5,)
    unpack_words(message, target)
    assert bits(target) == bits(source)
    assert torch.equal(whole[:, 7:], outside)


def test_empty_and_unknown_tensors() -> None:
    """Catches a step without rows that fails, and a type whose values would be cut short."""
    assert pack_words([torch.zeros(0, 7), torch.zeros(0, dtype=torch.int32)]).numel() == 0
    with pytest.raises(TypeError, match="float64"):
        pack_words([torch.zeros(2, dtype=torch.float64)])


def test_followers_take_rank_0s_values_in_one_message() -> None:
    """Catches a leader that is overwritten, a follower that keeps its own, and extra messages."""
    leader = Group(0)
    mine, theirs = step(1), step(2)
    before = bits(mine)
    Ranks(leader).follow(*mine)
    assert bits(mine) == before and leader.messages == 1
    follower = Group(1, sent=leader.sent)
    Ranks(follower).follow(*theirs)
    assert bits(theirs) == before and follower.messages == 1


def test_one_rank_sends_nothing() -> None:
    """Catches work added to a server without tensor parallelism."""
    alone = Group(0, size=1)
    Ranks(alone).follow(*step(1))
    assert alone.messages == 0


def parts(**changed: object) -> dict[str, str]:
    given = {"config": CONFIG, "draft": TABLE, "verify": TABLE, "weights": {"w": torch.ones(3)}}
    return parts_of(**(given | changed))  # type: ignore[arg-type]


def test_equal_ranks_agree() -> None:
    """Catches a hash of something that differs by itself: an object's address, an order, a path."""
    weights = {"w": torch.ones(3, dtype=torch.bfloat16)}
    assert disagreement([parts(), parts(), parts()]) is None
    assert disagreement([parts(weights=weights), parts(weights=dict(weights))]) is None
    assert disagreement([parts(draft=None, verify=None, weights={})] * 2) is None


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            {"verify": LatencyTable(TABLE.sizes, TABLE.ms * (1 + 1e-12), 64)},
            "the verify latency table",
        ),
        ({"draft": LatencyTable(TABLE.sizes, TABLE.ms, 8)}, "the draft latency table"),
        ({"weights": {"w": torch.tensor([1.0, 1.0, 1.0000001])}}, "the estimators"),
        ({"weights": {}}, "the estimators"),
        (
            {
                "config": ForeSparkConfig.from_any(
                    {"method": "forespark", "model": "drafter", "scheduler": {"min_gain": 0.5}}
                )
            },
            "the settings",
        ),
    ],
)
def test_a_difference_is_named_alike_for_every_rank(changed: dict[str, object], named: str) -> None:
    """Catches a part that is left out of the hash, and a line that names the wrong one."""
    line = disagreement([parts(), parts(), parts(**changed)])
    assert line is not None and "\n" not in line
    assert f"{named} (rank 2);" in line
    assert line.count("(rank") == 1 and line.startswith("tensor_parallel_size: 3 ranks")

"""Broken checkpoints are named, at load and while serving."""

import numpy as np
import pytest
import torch

from forespark.estimators.numbers import broken_weight, check_estimates, check_weights

GOOD = ("layer.weight", torch.full((3, 4), 3e38))  # the sum is infinite, no weight is


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_is_named(bad, dtype):
    """Would catch a check that passes a NaN, or that blames the wrong weight."""
    broken = torch.zeros(5, dtype=dtype)
    broken[2] = bad
    with pytest.raises(ValueError, match=r"model: drafts: weight head.bias has 1 of 5 values"):
        check_weights([GOOD, ("empty", torch.zeros(0)), ("head.bias", broken)], "drafts")


def test_large_and_integer_weights_pass():
    """Would catch a check that refuses what works."""
    assert broken_weight([GOOD, ("table", torch.arange(4))]) is None
    assert broken_weight([]) is None


def arrays():
    return {
        "scores": np.full((4, 3), 0.5, dtype=np.float32),
        "survival": np.full((4, 3), -np.inf, dtype=np.float32),
    }


def test_positions_never_drafted_are_no_fault():
    """Would catch a server that stops because a draft was short."""
    check_estimates(arrays(), [GOOD])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(("name", "layer"), [("scores", "pre-draft"), ("survival", "post-draft")])
def test_an_estimate_names_its_layer_and_the_weight_behind_it(bad, name, layer):
    """Would catch a NaN that is planned with, or a message that leaves the cause open."""
    held = arrays()
    held[name][2, 1] = bad
    with pytest.raises(ValueError) as error:
        check_estimates(held, [GOOD, ("out.weight", torch.tensor([1.0, np.nan]))])
    text = str(error.value)
    assert "\n" not in text and layer in text
    assert "draft token 2 of request slot 2" in text and "weight out.weight has 1 of 2" in text
    with pytest.raises(ValueError, match="every weight is finite"):
        check_estimates(held, [GOOD])

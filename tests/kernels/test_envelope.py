"""`envelope`: kernel against reference, and the reference against chords written out in Python.

Tolerance: a score is a difference of sums of up to K products of up to K sigmoids. Each factor is
good to about 4 ulp (exp and division on the GPU), so R, at most K, is good to about
4 K * K * 6e-8 < 6e-5 in the worst case and near 1e-6 in practice; scores are compared to 2e-5.
"""

from __future__ import annotations

import math

import pytest
import torch
from forespark.triton_kernels.envelope import envelope, launch_envelope
from forespark.triton_kernels.envelope_ref import envelope_ref

TOLERANCE = {"atol": 2e-5, "rtol": 0.0}
SIZES = [(0, 15), (1, 1), (1, 15), (2, 16), (5, 7), (9, 2)]
MODES = [(False, False), (True, False), (False, True)]  # single_curve, directional


def plain_scores(logits, steps, limit, single_curve, directional):
    """Slopes of the highest chord over each point, in float64 and with no torch."""
    reward = [0.0]
    for draft in range(1, steps + 1):
        row = steps if single_curve else draft
        start = 0 if directional else row * (row - 1) // 2
        survival, total = 1.0, 0.0
        for logit in logits[start : start + draft]:
            survival /= 1.0 + math.exp(-logit)
            total += survival
        reward.append(total)
    reward = reward[: limit + 1]
    hull = []
    for at in range(len(reward)):
        chords = [
            reward[a] + (reward[b] - reward[a]) * (at - a) / max(b - a, 1)
            for a in range(at + 1)
            for b in range(at, len(reward))
        ]
        hull.append(max(chords))
    slopes = [max(high - low, 0.0) for low, high in zip(hull, hull[1:], strict=False)]
    return slopes + [0.0] * (steps - limit)


def make_case(generator, num_requests, steps, directional, limited=True):
    width = steps if directional else steps * (steps + 1) // 2
    logits = 3 * torch.randn(num_requests, width, generator=generator)
    scale = 0.5 + torch.rand(width, generator=generator)
    bias = torch.randn(width, generator=generator)
    limits = torch.randint(0, steps + 1, (num_requests,), generator=generator, dtype=torch.int32)
    return logits, scale, bias, limits if limited else None


def to_device(case, device):
    return [None if tensor is None else tensor.to(device) for tensor in case]


@pytest.mark.parametrize("single_curve, directional", MODES)
@pytest.mark.parametrize("num_requests, steps", SIZES)
def test_reference_matches_chords(num_requests, steps, single_curve, directional):
    """Catches a wrong triangle offset or a hull over the wrong points in the specification."""
    generator = torch.Generator().manual_seed(steps)
    logits, scale, bias, limits = make_case(generator, num_requests, steps, directional)
    got = envelope_ref(logits, steps, scale, bias, limits, single_curve, directional)
    calibrated = (logits.double() * scale + bias).tolist()
    want = [
        plain_scores(row, steps, limit, single_curve, directional)
        for row, limit in zip(calibrated, limits.tolist(), strict=True)
    ]
    torch.testing.assert_close(got, torch.tensor(want).reshape(got.shape), **TOLERANCE)


@pytest.mark.parametrize("single_curve, directional", MODES)
@pytest.mark.parametrize("num_requests, steps", SIZES)
def test_kernel_matches_reference(device, poisoned, num_requests, steps, single_curve, directional):
    """Catches a masked lane that leaks into a product, and scores left unwritten."""
    generator = torch.Generator().manual_seed(10 + steps)
    for limited in (True, False):
        case = make_case(generator, num_requests, steps, directional, limited)
        out = poisoned((num_requests, steps), torch.float32)
        launch_envelope(*to_device(case, device), out, single_curve, directional)
        logits, scale, bias, limits = case
        want = envelope_ref(logits, steps, scale, bias, limits, single_curve, directional)
        torch.testing.assert_close(out.cpu(), want, **TOLERANCE)
        assert bool((out.diff(dim=1) <= 0).all()) and bool((out >= 0).all())


@pytest.mark.parametrize("logit", [-100.0, -5.0, 0.0, 5.0, 100.0])
def test_uncalibrated_extremes(device, poisoned, logit):
    """Catches exp overflow turning a certain rejection or acceptance into NaN."""
    logits = torch.full((3, 120), logit, device=device)
    out = launch_envelope(logits, None, None, None, poisoned((3, 15), torch.float32))
    want = envelope_ref(logits.cpu(), 15)
    torch.testing.assert_close(out.cpu(), want, **TOLERANCE)


def test_reward_past_its_peak_scores_zero(device, poisoned):
    """Catches a negative slope, which would order draft lengths below `do not draft`."""
    logits = torch.full((1, 120), -8.0, device=device)
    logits[0, 21:28] = 8.0  # draft length 7 accepts everything, longer ones nothing
    out = launch_envelope(logits, None, None, None, poisoned((1, 15), torch.float32)).cpu()
    assert bool((out[0, :7] > 0.99).all()) and out[0, 7:].tolist() == [0.0] * 8


@pytest.mark.parametrize("single_curve, directional", MODES)
def test_one_nan_poisons_its_row_only(device, poisoned, single_curve, directional):
    """Catches a broken layer that passes for a score of 0, so nobody finds it."""
    generator = torch.Generator().manual_seed(3)
    logits, scale, bias, limits = make_case(generator, 3, 15, directional)
    logits[1, -4] = float("nan")
    limits[1] = 2
    case = to_device((logits, scale, bias, limits), device)
    out = launch_envelope(*case, poisoned((3, 15), torch.float32), single_curve, directional).cpu()
    assert bool(out[1].isnan().all()) and not bool(out[[0, 2]].isnan().any())
    want = envelope_ref(logits, 15, scale, bias, limits, single_curve, directional)
    assert bool(want[1].isnan().all())


def test_wrapper_runs_the_reference_on_cpu_and_names_what_is_wrong():
    """Catches a calibration of another K or drafter kind accepted without a word."""
    scores = torch.full((2, 3), float("nan"))
    assert envelope(torch.zeros(2, 6), None, None, None, scores) is scores
    torch.testing.assert_close(scores, torch.tensor([[0.5, 0.25, 0.125]]).expand(2, 3))
    with pytest.raises(ValueError, match=r"envelope: logits is .*\[2, 3\].*shape must be \[2, 6\]"):
        envelope(torch.zeros(2, 3), None, None, None, scores)
    with pytest.raises(ValueError, match=r"envelope: scale is .*\[3\].*shape must be \[6\]"):
        envelope(torch.zeros(2, 6), torch.ones(3), torch.ones(6), None, scores)
    with pytest.raises(ValueError, match="scale and bias come together"):
        envelope(torch.zeros(2, 6), torch.ones(6), None, None, scores)


@pytest.mark.gpu
@pytest.mark.parametrize("single_curve, directional", MODES)
@pytest.mark.parametrize("num_warps", [1, 2, 4])
def test_many_random_rows(device, poisoned, single_curve, directional, num_warps):
    """Catches a reverse scan or a layout that is wrong only when several warps share a tile."""
    generator = torch.Generator().manual_seed(5)
    for steps in (2, 7, 15, 16, 31):
        case = make_case(generator, 2003, steps, directional)
        out = poisoned((2003, steps), torch.float32)
        launch_envelope(*to_device(case, device), out, single_curve, directional, num_warps)
        logits, scale, bias, limits = case
        want = envelope_ref(logits, steps, scale, bias, limits, single_curve, directional)
        torch.testing.assert_close(out.cpu(), want, atol=6e-5 if steps > 16 else 2e-5, rtol=0.0)
        assert bool((out.diff(dim=1) <= 0).all()) and bool((out >= 0).all())

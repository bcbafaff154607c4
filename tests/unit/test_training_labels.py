"""Soft acceptance targets, the cycle of draft lengths, and which slots count."""

import torch
from forespark.training.labels import acceptance_targets, draft_length, valid_slots


def test_cycle_starts_with_the_full_block():
    """Catches a cycle that never trains one row of the triangle, or starts at 1."""
    assert [draft_length(step, 4) for step in range(9)] == [4, 1, 2, 3, 4, 1, 2, 3, 4]


def test_targets_are_the_overlap_over_the_kept_candidates():
    """Catches summing over the vocabulary, or normalising P over the candidates only."""
    torch.manual_seed(0)
    target = torch.randn(3, 11)
    ids = torch.tensor([[0, 4], [7, 2], [10, 3]])
    scores = torch.randn(3, 2)
    alpha = acceptance_targets(scores, ids, target)
    for row in range(3):
        p = target[row].softmax(-1)
        q = scores[row].softmax(-1)
        expected = sum(min(float(p[i]), float(q[k])) for k, i in enumerate(ids[row].tolist()))
        assert abs(float(alpha[row]) - expected) < 1e-6


def test_label_temperature_is_the_verification_temperature():
    """Catches scaling only one of P and Q, and a greedy limit that is not the argmax rule."""
    target = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    ids = torch.tensor([[0, 1], [1, 2]])
    scores = torch.tensor([[3.0, 0.0], [3.0, 0.0]])
    assert acceptance_targets(scores, ids, target, 0.0).tolist() == [1.0, 0.0]
    sharp = acceptance_targets(scores, ids, target, 0.05)
    torch.testing.assert_close(sharp, torch.tensor([1.0, 0.0]), atol=1e-6, rtol=0)


def test_slots_stop_at_the_end_and_at_unsupervised_text():
    """Catches labels on the next user turn, on padding, on the anchor or behind the row."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1]])
    anchors = torch.tensor([[2, 3, 6, 1]])
    valid = valid_slots(mask, anchors, torch.tensor([[True, True, True, False]]), 4)
    expected = [[0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert valid[0].int().tolist() == expected

"""The GPU side of the layer without a GPU: its dispatch, with vLLM's convolution stood in for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forespark.triton_kernels.gdn_types import GdnFactors

from forespark.hybrid.torch_core import gdn_core, plain_window, roll_window
from forespark.hybrid.workspace import GdnWorkspace

KEY_HEADS, VALUE_HEADS, SIZE, TAPS, DRAFTS, SLOTS = 1, 2, 16, 4, 4, 6
CHANNELS = 2 * KEY_HEADS * SIZE + VALUE_HEADS * SIZE


def fake_layer(seed: int = 0) -> Any:
    """What the layer's methods read, without vLLM's construction of it."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    layer = SimpleNamespace(
        prefix="layers.0",
        A_log=0.1 * draw(VALUE_HEADS) - 1,
        dt_bias=draw(VALUE_HEADS),
        conv1d=SimpleNamespace(weight=draw(CHANNELS, 1, TAPS), bias=None),
        activation="silu",
        kv_cache=(
            draw(SLOTS, TAPS - 1 + DRAFTS, CHANNELS), draw(SLOTS, VALUE_HEADS, SIZE, SIZE),
        ),
        num_k_heads=KEY_HEADS,
        tp_size=1,
        norm=SimpleNamespace(weight=draw(SIZE), activation="silu"),
        layer_norm_epsilon=1e-6,
    )  # fmt: skip
    factors = GdnFactors.allocate(1, 4, KEY_HEADS, VALUE_HEADS, SIZE, SIZE, dtype=torch.float32)
    layer.workspace = GdnWorkspace(factors)
    layer.factors = factors.layer(layer.workspace.join(layer))
    return layer


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, b and a."""
    rng = torch.Generator().manual_seed(tokens)
    shapes = ((tokens, CHANNELS), (tokens, VALUE_HEADS), (tokens, VALUE_HEADS))
    x, b, a = (torch.randn(shape, generator=rng) for shape in shapes)
    return x, b, a


def drafts(widths: list[int], kept: list[int]) -> Any:
    """Metadata of a batch of drafts alone, in slots 1, 2, ..."""
    ends = torch.tensor([0, *widths]).cumsum(0).int()
    slots = torch.arange(1, len(widths) + 1, dtype=torch.int32)
    return SimpleNamespace(
        spec_sequence_masks=torch.ones(len(widths), dtype=torch.bool),
        num_prefills=0,
        num_decodes=0,
        num_spec_decodes=len(widths),
        num_actual_tokens=int(ends[-1]),
        spec_state_indices_tensor=slots[:, None].expand(-1, DRAFTS + 1),
        spec_query_start_loc=ends,
        num_accepted_tokens=torch.tensor(kept, dtype=torch.int32),
    )


def plain(tokens: int, slot: int) -> Any:
    """Metadata of one request that goes on by `tokens` tokens."""
    return SimpleNamespace(
        spec_sequence_masks=None,
        num_prefills=1,
        num_decodes=0,
        num_actual_tokens=tokens,
        non_spec_query_start_loc=torch.tensor([0, tokens]),
        non_spec_state_indices_tensor=torch.tensor([slot]),
        has_initial_state=torch.tensor([True]),
    )


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("accepted", [1, 2, 5])
def test_a_round_after_any_acceptance_goes_on_from_it(width: int, accepted: int) -> None:
    """Catches a window or state that keeps a rejected token, at trimmed lengths too."""
    accepted = min(accepted, width)
    drafted, straight = fake_layer(), fake_layer()
    x, b, a = inputs(width + 3)
    out = torch.zeros(width, VALUE_HEADS, SIZE)
    gdn_core(drafted, x[:width], b[:width], a[:width], out, drafts([width], [1]))
    drafted.workspace.commit(torch.tensor([accepted]))
    # What the request really says: the accepted tokens, then three others.
    rows = [*range(accepted), *range(width, width + 3)]
    expected = torch.zeros(len(rows), VALUE_HEADS, SIZE)
    gdn_core(straight, x[rows], b[rows], a[rows], expected, plain(len(rows), 1))
    torch.testing.assert_close(out[:accepted], expected[:accepted], rtol=1e-5, atol=1e-5)
    out = torch.zeros(3, VALUE_HEADS, SIZE)
    gdn_core(drafted, x[width:], b[width:], a[width:], out, drafts([3], [accepted]))
    torch.testing.assert_close(out, expected[accepted:], rtol=1e-5, atol=1e-5)
    drafted.workspace.commit(torch.tensor([3]))
    torch.testing.assert_close(drafted.kv_cache[1], straight.kv_cache[1], rtol=1e-5, atol=1e-5)


def test_windows_of_short_prefills_keep_what_came_before() -> None:
    """Catches a prefill chunk shorter than the convolution."""
    window, other = torch.randn(3, 4), torch.zeros(9, 4)
    other[:3] = window
    weight, x = torch.randn(4, TAPS), torch.randn(2, 4)
    torch.testing.assert_close(
        plain_window(window, x, weight, True), roll_window(other, x, weight, 1)
    )
    torch.testing.assert_close(window, other[1:4])


class TestGpuDispatch:
    """`CompactGdnLayer`'s methods on the fake layer."""

    @pytest.fixture
    def module(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        pytest.importorskip("vllm")
        from forespark.hybrid import layer

        def convolve(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, *_: Any, **k: Any):
            windows, bounds = state.transpose(-1, -2), k["query_start_loc"].tolist()
            assert k["max_query_len"] == DRAFTS + 1
            out = torch.zeros_like(x)
            for row, slot in enumerate(k["conv_state_indices"].tolist()):
                at = slice(bounds[row], bounds[row + 1])
                kept = int(k["num_accepted_tokens"][row])
                out[at] = roll_window(windows[slot], x[at], weight, kept)
            return out

        monkeypatch.setattr(layer, "causal_conv1d_update", convolve)
        return layer

    def test_drafts_alone_equal_the_torch_core(self, module: Any) -> None:
        """Catches wrong arguments to the convolution or the kernel."""
        one, two = fake_layer(), fake_layer()
        x, b, a = inputs(8)
        metadata = drafts([5, 1, 2], [2, 1, 4])
        out, expected = (torch.zeros(8, VALUE_HEADS, SIZE) for _ in range(2))
        module.CompactGdnLayer._verify(one, x, b, a, out, metadata)
        gdn_core(two, x, b, a, expected, metadata)
        torch.testing.assert_close(out, expected)
        for field in ("z", "k", "g", "slot", "width"):
            kept = (getattr(layer.factors, field) for layer in (one, two))
            torch.testing.assert_close(*kept)
        torch.testing.assert_close(one.kv_cache[0], two.kv_cache[0])

    def test_the_gate_is_applied_in_the_same_launch(self, module: Any) -> None:
        """Catches a gate or a norm weight that is dropped on the way."""
        x, b, a = inputs(5)
        gate = torch.randn(5, VALUE_HEADS, SIZE)
        plain_out, gated = (torch.zeros(5, VALUE_HEADS, SIZE) for _ in range(2))
        module.CompactGdnLayer._verify(fake_layer(), x, b, a, plain_out, drafts([5], [1]))
        layer = fake_layer()
        module.CompactGdnLayer._verify(layer, x, b, a, gated, drafts([5], [1]), gate)
        scale = (plain_out.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        expected = plain_out * scale * layer.norm.weight * torch.nn.functional.silu(gate)
        torch.testing.assert_close(gated, expected)

    def test_mixed_batches_give_vllm_the_others_alone(
        self, module: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Catches outputs scattered to the wrong rows and metadata that stays changed."""
        from forespark.hybrid.metadata import CompactGdnMetadata

        layer = fake_layer()
        alone = drafts([2], [1])
        metadata = CompactGdnMetadata(
            num_prefills=1, num_prefill_tokens=3, num_decodes=0, num_decode_tokens=0,
            num_spec_decodes=1, num_spec_decode_tokens=2, num_actual_tokens=5,
            spec_sequence_masks=torch.tensor([False, True]),
            spec_query_start_loc=alone.spec_query_start_loc,
            spec_state_indices_tensor=alone.spec_state_indices_tensor,
            num_accepted_tokens=alone.num_accepted_tokens,
            spec_token_indx=torch.tensor([3, 4]), non_spec_token_indx=torch.tensor([0, 1, 2]),
        )  # fmt: skip
        context = SimpleNamespace(attn_metadata={layer.prefix: metadata})
        monkeypatch.setattr(module, "get_forward_context", lambda: context)
        given = []

        def stock(self: Any, x: torch.Tensor, b: Any, a: Any, out: torch.Tensor) -> None:
            given.append((x, context.attn_metadata[layer.prefix]))
            out.fill_(7.0)

        monkeypatch.setattr(module.QwenGatedDeltaNetAttention, "_forward_core", stock)
        real = object.__new__(module.CompactGdnLayer)
        real.__dict__.update(vars(layer), _modules={}, _parameters={}, _buffers={})
        x, b, a = inputs(5)
        out, expected = torch.zeros(5, VALUE_HEADS, SIZE), torch.zeros(2, VALUE_HEADS, SIZE)
        module.CompactGdnLayer._forward_core(real, x, b, a, out)
        gdn_core(fake_layer(), x[3:], b[3:], a[3:], expected, alone)
        torch.testing.assert_close(out[3:], expected)
        assert (out[:3] == 7.0).all() and torch.equal(given[0][0], x[:3])
        assert given[0][1].spec_sequence_masks is None and given[0][1].num_actual_tokens == 3
        assert context.attn_metadata[layer.prefix] is metadata

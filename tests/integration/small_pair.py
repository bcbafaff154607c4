"""A target and a drafter over 16 tokens whose distributions are known in closed form.

The target's layers add nothing to its residual stream, so its next token depends on the last one
alone: every token that the engine emits is a draw from a known row of `chances()`, and 200,000 of
them take seconds. The drafter is a full DFlash2 model with random attention; its selector holds a
distorted copy of the target's table, so that acceptance and the post-draft score vary from token to
token.
"""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from engines import engine, runner_of
from harness import PACKED, PAIR
from probes import StepProbe

VOCAB = 16
TOKENS = 4  # K of the pair
HIDDEN = 64
RANK = VOCAB
MASK = VOCAB - 1
TOP = 12  # candidates of the selector; the drafter never proposes the others
SHARP = 1.3  # spread of the target's logits
DISTORTION = 0.5  # spread of what the drafter adds to them
SHAPE = {
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "layer_types": ["full_attention"] * 2,
}


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [last token, next token] of the target and of the drafter's selector."""
    rng = torch.Generator().manual_seed(7)
    target = SHARP * torch.randn(VOCAB, VOCAB, generator=rng)
    # Some rows are drafted well and some badly: the estimator has something to tell apart.
    distortion = DISTORTION * torch.rand(VOCAB, 1, generator=rng) * 2
    return target, target + distortion * torch.randn(VOCAB, VOCAB, generator=rng)


def chances() -> torch.Tensor:
    """f64 [last token, next token]: the target's distribution."""
    return tables()[0].double().softmax(-1)


def _layers(count: int, rng: torch.Generator, gain: float) -> dict[str, torch.Tensor]:
    """Random Qwen3 layers; `gain` scales what they add to the residual stream."""
    wide, narrow, head = 2 * 32, 32, 32
    shapes = {
        "self_attn.q_proj": (wide, HIDDEN),
        "self_attn.k_proj": (narrow, HIDDEN),
        "self_attn.v_proj": (narrow, HIDDEN),
        "self_attn.o_proj": (HIDDEN, wide),
        "mlp.gate_proj": (64, HIDDEN),
        "mlp.up_proj": (64, HIDDEN),
        "mlp.down_proj": (HIDDEN, 64),
    }
    weights = {}
    for index in range(count):
        prefix = f"layers.{index}."
        for name, shape in shapes.items():
            scale = gain if name.endswith(("o_proj", "down_proj")) else 1.0
            weights[f"{prefix}{name}.weight"] = (
                scale * torch.randn(shape, generator=rng) / shape[1] ** 0.5
            )
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{norm}.weight"] = torch.ones(HIDDEN)
        for norm in ("q_norm", "k_norm"):
            weights[f"{prefix}self_attn.{norm}.weight"] = torch.ones(head)
    return weights


def _save(folder: Path, source: Path, changes: dict[str, Any], weights: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if "transformer_layer_config" in config:
        config["transformer_layer_config"] |= SHAPE
    else:
        config |= SHAPE
    text = json.dumps(config | changes | {"dtype": "float32"})
    (folder / "config.json").write_text(text, encoding="utf-8")
    tensors = {name: tensor.float().contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / "model.safetensors")


def build(root: Path) -> Path:
    """Write `root/target` and `root/drafter`; returns `root`."""
    rng = torch.Generator().manual_seed(11)
    table, drafted = tables()
    # Token x is the unit vector e_x; its norm's output is 8 e_x, which the head turns into row x.
    scale = HIDDEN**0.5
    embedding, head = torch.eye(VOCAB, HIDDEN), torch.zeros(VOCAB, HIDDEN)
    head[:, :VOCAB] = table.T / scale
    target = {f"model.{n}": w for n, w in _layers(2, rng, gain=0.0).items()}
    target |= {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(HIDDEN)}
    changes = {"tie_word_embeddings": False, "eos_token_id": None, "pad_token_id": None}
    _save(root / "target", PAIR / "target", changes, {**target, "lm_head.weight": head})

    # A drafted row starts as e_MASK: what the head says of that is taken off again by the selector.
    gate = torch.zeros(RANK, HIDDEN)
    gate[:, MASK] = 1 / scale
    drafter = {
        **_layers(2, rng, gain=0.15),
        "fc.weight": torch.randn(HIDDEN, HIDDEN, generator=rng) / scale,
        "hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "candidate_selector.hidden_projection.weight": gate,
        "candidate_selector.predecessor_codebook": torch.eye(VOCAB),
        "candidate_selector.successor_codebook": drafted.T - table[MASK][:, None],
    }
    for index in range(2):
        for name in ("attention_conv", "mlp_conv"):
            kernel = torch.zeros(2, 2, HIDDEN)
            kernel[:, 0] = 1.0
            prefix = f"layers.{index}.{name}."
            drafter[f"{prefix}base_kernel"] = kernel
            drafter[f"{prefix}kernel_projection.weight"] = 0.02 * torch.randn(
                2 * 2 * HIDDEN // 16, HIDDEN, generator=rng
            )
    changes = {
        "aux_hidden_state_layer_ids": [1],
        "draft_vocab_size": VOCAB,
        "block_size": TOKENS + 1,
        "mask_token_id": MASK,
        "selector_rank": RANK,
        "selector_top_k": TOP,
    }
    _save(root / "drafter", PAIR / "drafter", changes, drafter)
    _save_estimators(root / "drafter", table, drafted, gate)
    return root


def _save_estimators(
    folder: Path, table: torch.Tensor, drafted: torch.Tensor, gate: torch.Tensor
) -> None:
    """The post-draft score is the acceptance after each token, as if every token were kept."""
    from forespark.estimators.checkpoint import save_estimators
    from forespark.estimators.post_draft import PostDraftEstimator
    from forespark.estimators.pre_draft import PreDraftEstimator

    torch.manual_seed(13)
    accepted = torch.minimum(table.softmax(-1), drafted.softmax(-1)).sum(-1)
    pre, post = PreDraftEstimator(HIDDEN, HIDDEN, TOKENS, rank=8), PostDraftEstimator(HIDDEN, RANK)
    with torch.no_grad():
        pre.out.bias.fill_(1.5)
        post.selector.weight.copy_(gate)
        post.head.weight.zero_()
        post.head.weight[0, HIDDEN:] = torch.logit(accepted)
        post.head.bias.zero_()
    save_estimators(folder, pre, post, dtype=torch.float32)


def transitions(task: dict[str, Any]) -> dict[str, Any]:
    """How often each token followed each other one at temperature 1; D and B of every step."""
    from vllm import SamplingParams

    llm = engine(
        {**task, "tokens": TOKENS},
        build(Path(tempfile.mkdtemp())),
        max_num_seqs=task["batch"],
        max_num_batched_tokens=2048,
        max_model_len=1024,
        skip_tokenizer_init=True,
    )
    runner = runner_of(llm)
    probe = StepProbe(runner) if task["policy"] in PACKED else None
    if task.get("own_probability"):
        _score_by_own_probability(runner.speculator)
    rng = random.Random(17)
    prompts = [[rng.randrange(VOCAB) for _ in range(4)] for _ in range(task["requests"])]
    params = SamplingParams(
        temperature=1.0, max_tokens=task["max_tokens"], ignore_eos=True, detokenize=False
    )
    counts = [[0] * VOCAB for _ in range(VOCAB)]
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(given, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = [prompt[-1], *output.outputs[0].token_ids]
        for before, after in itertools.pairwise(tokens):
            counts[before][after] += 1
    accepted = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    result = {"counts": counts, "steps": accepted["vllm:spec_decode_num_drafts"]}
    result["accepted"] = accepted["vllm:spec_decode_num_accepted_tokens"]
    if probe is not None:
        result |= {"broken": probe.broken, "D": probe.budgets, "B": probe.verified}
        result |= {"lengths": probe.lengths}
    return result


def _score_by_own_probability(speculator: Any) -> None:
    """The estimator that must not be: it reads the token whose verification it decides."""

    def own(hidden: torch.Tensor, previous: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        selector = speculator.model.model.candidate_selector
        gated = selector.predecessor_codebook[previous] * selector.hidden_projection(hidden)
        unary = torch.nn.functional.linear(hidden, speculator.model.lm_head.weight[:VOCAB])
        scores = unary + gated @ selector.successor_codebook.T
        chance = scores.float().softmax(-1).gather(1, drafted[:, None])[:, 0]
        return torch.logit(chance.clamp(1e-6, 1 - 1e-6))

    speculator.estimators.post_logits = own

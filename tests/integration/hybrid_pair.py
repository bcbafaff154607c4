"""A tiny Qwen3-Next target (Gated DeltaNet, attention, experts) with a drafter that often matches.

The target is `small_pair`'s table of next tokens, disturbed by layers that read the whole text: the
drafter, which knows the table, is right often, and a wrong recurrent state changes the text.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import small_pair
import torch
from engines import engine, runner_of

GAIN = 0.3  # of what the layers add to the residual stream
LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
BATCH = 12


def build(root: Path) -> Path:
    """Write `root/target` and `root/drafter`; returns `root`."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    small_pair.build(root / "plain")
    (root / "plain" / "drafter").rename(root / "drafter")
    torch.manual_seed(23)
    config = Qwen3NextConfig(
        vocab_size=small_pair.VOCAB,
        hidden_size=small_pair.HIDDEN,
        intermediate_size=64,
        num_hidden_layers=len(LAYERS),
        layer_types=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    model = Qwen3NextForCausalLM(config).float()
    scale, table = small_pair.HIDDEN**0.5, small_pair.tables()[0]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5)
            if any(part in name for part in ("out_proj", "o_proj", "down_proj")):
                weight *= GAIN / scale
            if name.endswith("A_log"):
                weight.fill_(-2.0)  # long memory: a state that is lost is missed
        model.model.embed_tokens.weight.copy_(torch.eye(small_pair.VOCAB, small_pair.HIDDEN))
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, : small_pair.VOCAB] = table.T / scale
    model.save_pretrained(root / "target")
    return root


def greedy(task: dict[str, Any]) -> dict[str, Any]:
    """Greedy texts of random prompts, a new request at every second step, and what happened.

    `task` may hold `blocks` (a small cache: preemption), `aborts` (as many more requests that are
    taken back after a few tokens) and `drop_commits` (the fault that the test must see).
    """
    from vllm import SamplingParams

    options: dict[str, Any] = {"additional_config": task.get("additional", {})}
    if "blocks" in task:
        options["num_gpu_blocks_override"] = task["blocks"]
    llm = engine(
        {**task, "tokens": small_pair.TOKENS},
        build(Path(tempfile.mkdtemp())),
        max_num_seqs=BATCH,
        max_num_batched_tokens=128,
        max_model_len=320,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        **options,
    )
    runner, core = runner_of(llm), llm.llm_engine
    commits = _count_commits(runner, task.get("drop_commits", False))
    rng = random.Random(29)
    # Some prompts are longer than one step's tokens: a prefill in chunks beside drafts.
    sizes = [rng.randint(140, 200) if index % 8 == 3 else rng.randint(1, 30) for index in range(64)]
    prompts = [[rng.randrange(small_pair.VOCAB - 1) for _ in range(size)] for size in sizes]
    params = SamplingParams(
        temperature=0, max_tokens=task["max_tokens"], ignore_eos=True, detokenize=False
    )
    texts: dict[str, list[int]] = {}
    waiting = [(f"r{index}", prompt) for index, prompt in enumerate(prompts[: task["prompts"]])]
    alive: dict[str, int] = {}
    step = 0
    while waiting or alive:
        if waiting and len(alive) < BATCH and step % 2 == 0:
            name, prompt = waiting.pop(0)
            core.add_request(name, {"prompt_token_ids": prompt}, params)
            alive[name] = step
            if task.get("aborts") and step % 8 == 0:
                core.add_request(f"x{step}", {"prompt_token_ids": prompt[::-1]}, params)
                alive[f"x{step}"] = step
        for output in core.step():
            if output.finished:
                texts[output.request_id] = list(output.outputs[0].token_ids)
                alive.pop(output.request_id, None)
        for name, since in list(alive.items()):
            if name.startswith("x") and step - since == 5:
                core.abort_request([name])
                del alive[name]
        step += 1
    counters = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    return {
        "texts": [texts[f"r{index}"] for index in range(task["prompts"])],
        "steps": step,
        "drafts": counters.get("vllm:spec_decode_num_draft_tokens", 0),
        "accepted": counters.get("vllm:spec_decode_num_accepted_tokens", 0),
        "preempted": counters["vllm:num_preemptions"],
        "commits": commits,
        **_layout(runner),
    }


def _count_commits(runner: Any, drop: bool) -> list[list[int]]:
    """Widths and accepted tokens of every commit from now on; with `drop`, none is done."""
    from forespark.hybrid.workspace import workspace_of

    context = runner.vllm_config.compilation_config.static_forward_context
    workspace, seen = workspace_of(context), []
    if workspace is None:
        return seen
    commit = workspace.commit

    def counted(accepted: Any) -> None:
        widths = workspace.factors.width[0, : len(accepted)].tolist()
        seen.extend([width, kept] for width, kept in zip(widths, accepted.tolist(), strict=True))
        if not drop:
            commit(accepted)

    workspace.commit = counted
    return seen


def _layout(runner: Any) -> dict[str, Any]:
    """Speculative state blocks of the recurrent layers."""
    from vllm.v1.kv_cache_interface import MambaSpec

    specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
    blocks = {spec.num_speculative_blocks for spec in specs if isinstance(spec, MambaSpec)}
    return {"speculative_blocks": sorted(blocks), "runner": type(runner).__name__}

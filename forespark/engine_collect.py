"""`forespark calibrate collect --engine`: drafts as the engine itself makes and verifies them.

One engine start. For every length d = 1..K all prompts are answered greedily with drafts of exactly
d tokens, all of them verified; the prompts are dealt over the loads, so each length sees all loads.
Every length is kept as soon as it is done: a run that was stopped goes on behind it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from forespark.calibration.collect import encode
from forespark.calibration.drafts import Drafts
from forespark.calibration.drafts_file import load_drafts, save_drafts
from forespark.calibration.fits import Variant, lengths_needed
from forespark.calibration.origin import Origin


def collect(
    target: Path,
    drafter: Path,
    prompts: Path,
    out: Path,
    documents: int,
    tokens: int,
    loads: list[int],
    engine: dict[str, Any],
    *,
    longest: int = 200,
    say: Callable[[str], None] = print,
) -> None:
    """Write the trace of a pair to `out` (.parquet); `engine` holds more arguments of vLLM's LLM.

    Raises ValueError for unusable input, or when `out` has parts of another collection beside it.
    """
    from transformers import AutoTokenizer

    if out.suffix != ".parquet":
        raise ValueError(f"out: {out} must end in .parquet, which holds what an engine drafts")
    if not loads or min(loads) < 1:
        raise ValueError(f"loads: {loads} must be one or more counts >= 1")
    origin = Origin.of_checkpoint(drafter)
    encoded = encode(AutoTokenizer.from_pretrained(target), prompts, documents, longest)
    key = asdict(origin) | {
        "tokens": tokens,
        "loads": loads,
        "prompts": hashlib.sha256(json.dumps(encoded).encode()).hexdigest(),
    }
    parts = _parts_folder(out, key)
    variant = Variant.DIRECTIONAL if origin.directional else Variant.TRIANGLE
    lengths = lengths_needed(origin.num_speculative_tokens, variant)
    missing = [d for d in lengths if not (parts / f"{d}.parquet").exists()]
    say(f"{len(encoded)} prompts, {len(lengths)} lengths, {len(lengths) - len(missing)} done")
    if missing:
        llm = _engine(target, drafter, origin, max(loads), engine)
        for d in missing:
            started = time.perf_counter()
            drafts, lost = _one_length(llm, encoded, d, tokens, loads, origin)
            save_drafts(drafts, parts / f"{d}.parquet")
            say(
                f"d = {d}: {drafts.length.size} drafts, {drafts.accepted.mean():.2f} accepted, "
                f"{lost} not wholly verified, {time.perf_counter() - started:.1f} s"
            )
    trace = Drafts.join([load_drafts(parts / f"{d}.parquet") for d in lengths])
    save_drafts(trace, out)
    shutil.rmtree(parts)
    say(f"{trace.length.size} drafts, K = {origin.num_speculative_tokens}: {out}")


def _parts_folder(out: Path, key: dict[str, Any]) -> Path:
    parts = out.with_name(f"{out.name}.parts")
    note, text = parts / "key.json", json.dumps(key, sort_keys=True)
    if note.exists() and note.read_text() != text:
        raise ValueError(
            f"out: {parts} holds parts of another collection (checkpoint, prompts, tokens or loads "
            "differ); remove it, or name another --out"
        )
    parts.mkdir(parents=True, exist_ok=True)
    note.write_text(text)
    return parts


def _engine(target: Path, drafter: Path, origin: Origin, load: int, options: dict[str, Any]) -> Any:
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # to send functions to the worker
    from vllm import LLM

    return LLM(
        str(target),
        max_num_seqs=load,
        enable_prefix_caching=False,
        speculative_config={
            "method": "forespark",
            "model": str(drafter),
            "num_speculative_tokens": origin.num_speculative_tokens,
            "scheduler": {"policy": "joint"},
        },
        **options,
    )


def _one_length(
    llm: Any, encoded: list[list[int]], d: int, tokens: int, loads: list[int], origin: Origin
) -> tuple[Drafts, int]:
    """Drafts of d tokens of all prompts, and how many were not wholly verified."""
    from forespark.benchmarks.closed_loop import use_policy
    from forespark.verifier import recording

    llm.collective_rpc(use_policy, args=(f"batchwise:{d}",))
    parts, lost = [], 0
    for index, load in enumerate(loads):
        names = list(range(len(encoded)))[index :: len(loads)]
        llm.collective_rpc(recording.begin, args=(d,))
        answer = _answer(llm.llm_engine, encoded, names, tokens, load)
        rows, unverified = llm.collective_rpc(recording.take)[0]
        lost += unverified
        # A draft that reaches past an answer's end is cut short by it.
        kept = [
            (request, *rest)
            for name, *rest in rows
            if rest[0] + d < answer[request := int(name.split("-")[0])]
        ]
        if kept:
            parts.append(_drafts(kept, load, d, origin))
    if not parts:
        raise ValueError(
            f"prompts: no answer is longer than a draft of {d} tokens; use others, or more --tokens"
        )
    return Drafts.join(parts), lost


def _drafts(rows: list[Any], load: int, d: int, origin: Origin) -> Drafts:
    request, position, accepted, pre, post = zip(*rows, strict=True)
    count = len(rows)
    return Drafts(
        np.array(request, dtype=np.int64),
        np.full(count, load, dtype=np.int32),
        np.array(position, dtype=np.int32),
        np.full(count, d, dtype=np.int16),
        np.array(accepted, dtype=np.int16),
        np.concatenate(pre).astype(np.float32),
        np.concatenate(post).astype(np.float32),
        origin,
    )


def _answer(
    core: Any, encoded: list[list[int]], names: list[int], tokens: int, load: int
) -> dict[int, int]:
    """Tokens of each prompt's greedy answer, `load` requests at a time."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=tokens, detokenize=False)
    waiting, alive, length = list(reversed(names)), 0, {}
    while waiting or alive:
        while waiting and alive < load:
            name = waiting.pop()
            core.add_request(str(name), {"prompt_token_ids": encoded[name]}, params)
            alive += 1
        for output in core.step():
            if output.finished:
                length[int(output.request_id.split("-")[0])] = len(output.outputs[0].token_ids)
                alive -= 1
    return length

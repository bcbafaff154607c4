"""`sharegpt-decode`: batches of C requests that decode together, C held constant.

C prompts are prefilled from an empty prefix cache and wait at a barrier inside the engine
(`barrier.py`) until all have a first token; then `--max-tokens` tokens of each are timed. Requests
that have theirs go on until the last one has, so that the batch stays full; their further tokens
count for throughput only. Prompts are those whose greedy answer is long enough: the first method
run finds them and writes them to `--answers`, which every later one reads.

`output_throughput` is all tokens of the window over its length, `median_tpot_ms` the median of the
requests' own times. Runs that the output file holds are not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

from forespark.benchmarks.barrier import KEY, SCHEDULER
from forespark.benchmarks.closed_loop import prepare
from forespark.benchmarks.engine import (
    add_engine_arguments,
    add_run_arguments,
    between,
    check,
    counters,
    start_engine,
)
from forespark.benchmarks.held import (
    guarded,
    held_record,
    missing,
    planned,
    run_all,
    save,
    settings,
)
from forespark.benchmarks.provenance import provenance
from forespark.benchmarks.workloads import read_workload

SETTINGS = ("method", "tokens", "temperature", "max_tokens", "longest_prompt", "prompts", "dtype",
            "max_model_len", "max_num_seqs", "max_num_batched_tokens", "enforce_eager")  # fmt: skip


def run_batch(
    llm: Any, prompts: list[list[int]], args: argparse.Namespace, name: str
) -> dict[str, Any]:
    """Time one batch of these prompts. RuntimeError when no request reaches its tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine, load = llm.llm_engine, len(prompts)
    llm.reset_prefix_cache()
    for number, ids in enumerate(prompts):
        params = SamplingParams(
            temperature=args.temperature,
            seed=number if args.temperature else None,
            max_tokens=args.max_model_len - len(ids),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={KEY: [name, load]},
        )
        engine.add_request(f"{name}-{number}", {"prompt_token_ids": ids}, params)
    tokens = {f"{name}-{number}": 0 for number in range(load)}
    took: dict[str, float] = {}  # ms a token of those that have theirs
    alive, begin, before, first = set(tokens), time.perf_counter(), None, 0
    while alive - took.keys():
        outputs, now = engine.step(), time.perf_counter()
        for output in outputs:
            request, count = output.request_id, len(output.outputs[0].token_ids)
            tokens[request] += count
            if before is not None and request not in took and tokens[request] > args.max_tokens:
                took[request] = 1e3 * (now - begin) / (tokens[request] - 1)
            if output.finished:
                alive.discard(request)
        if before is None and all(tokens.values()):
            before, begin, first = counters(llm), time.perf_counter(), sum(tokens.values())
    duration, after = time.perf_counter() - begin, counters(llm)
    engine.abort_request(list(alive))
    while engine.has_unfinished_requests():
        engine.step()
    if before is None or not took:
        raise RuntimeError(f"load {load}: no request reached {args.max_tokens} tokens")
    throughput = (sum(tokens.values()) - first) / duration
    return {
        "load": load, "output_throughput": throughput, "tokens_per_user": throughput / load,
        "duration": duration, "completed": len(took), "short": load - len(took),
        "tokens_at_release": first,
        "median_tpot_ms": statistics.median(took.values()), "counters": between(before, after),
    }  # fmt: skip


def long_enough(
    llm: Any, prompts: list[list[int]], tokens: int, need: int, file: Path, longest: int
) -> list[int]:
    """Indices of the first `need` prompts whose greedy answer has more than `tokens` tokens.

    Read from `file` if it is of the same prompts and tokens, found and written otherwise. Prompts
    that leave no room in `longest` tokens are left out. ValueError when there are too few.
    """
    from vllm import SamplingParams

    identity = {"prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]}
    identity |= {"tokens": tokens, "longest": longest}
    held: dict[str, Any] = {}
    if file.exists():
        held = json.loads(file.read_text(encoding="utf-8"))
        if {key: held.get(key) for key in identity} != identity:
            raise ValueError(f"--answers: {file} is of other prompts or lengths; rename it")
    found, tried = list(held.get("long", [])), int(held.get("tried", 0))
    params = SamplingParams(temperature=0.0, max_tokens=tokens + 1, detokenize=False)
    while len(found) < need and tried < len(prompts):
        numbers = range(tried, min(tried + 2 * need, len(prompts)))
        fits = [n for n in numbers if len(prompts[n]) + tokens + 1 <= longest]
        outputs = llm.generate(
            [{"prompt_token_ids": prompts[n]} for n in fits], params, use_tqdm=False
        )
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        found += [n for n, length in zip(fits, lengths, strict=True) if length > tokens]
        tried = numbers.stop
        save({**identity, "tried": tried, "long": found}, file)
        print(f"{len(found)} of {tried} prompts have more than {tokens} tokens", flush=True)
    if len(found) < need:
        raise ValueError(
            f"--prompts: {len(found)} of {tried} answers have more than {tokens} tokens, load "
            f"{need} needs as many; give more prompts, a lower load or fewer --max-tokens"
        )
    return found[:need]


def main() -> None:
    args = _arguments()
    check(args)
    workload = read_workload(args.prompts)
    new = {
        "workload": "sharegpt-decode", **settings(args, *SETTINGS),
        "provenance": provenance(args), "runs": [],
    }  # fmt: skip
    record = held_record(args.out, new)
    plan = planned(args)
    todo = missing(record, plan)
    print(f"{len(plan) - len(todo)} of {len(plan)} runs are done", flush=True)
    if not todo:
        return
    prompts = prepare(args, workload)
    record["left_out"] = dict(workload.dropped)
    llm = start_engine(args, prefix_caching=True, scheduler_cls=SCHEDULER)
    need = max(args.loads)
    answers = args.answers or args.out.with_name(f"{args.prompts.stem}-answers.json")
    chosen = [
        prompts.ids[n]
        for n in long_enough(llm, prompts.ids, args.max_tokens, need, answers, args.max_model_len)
    ]
    names = iter(range(10**9))
    run_all(args, record, todo, llm,
            lambda load: run_batch(llm, chosen[:load], args, f"batch{next(names)}"))  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_engine_arguments(parser)
    add_run_arguments(parser, repeats=3)
    parser.add_argument("--answers", type=Path, help="which prompts have long answers (JSON)")
    return parser.parse_args()


if __name__ == "__main__":
    guarded(main)

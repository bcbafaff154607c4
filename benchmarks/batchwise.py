"""`forespark calibrate batchwise`: every draft length at every load, and the schedule that follows.

Runs `batchwise:k` for k = 1..K at the given loads in one engine (a closed loop) and keeps the
fastest k of each load. Runs that the output file holds are not run again. The file ends with both
forms of the schedule: ours (`scheduler.batchwise_schedule`) and vLLM's own
(`num_speculative_tokens_per_batch_size`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from forespark.benchmarks.closed_loop import SETTINGS, ClosedLoop, prepare
from forespark.benchmarks.engine import add_engine_arguments, add_run_arguments, check, start_engine
from forespark.benchmarks.held import held_record, missing, planned, run_all, save, settings
from forespark.benchmarks.provenance import provenance
from forespark.benchmarks.workloads import read_workload
from forespark.calibration.batchwise import fastest_caps, merged, our_schedule, vllm_schedule


def with_caps(args: argparse.Namespace) -> argparse.Namespace:
    """The runs to do: one policy for every cap. ValueError, one line, for what cannot be run."""
    if args.method != "forespark" or args.policies != ["batchwise"]:
        raise ValueError(
            f"--policies: {','.join(args.policies)} with --method {args.method} is not what this "
            "command runs, which is every batchwise:k; leave both out"
        )
    if args.tokens < 1:
        raise ValueError(f"--tokens: {args.tokens} leaves no length to try; give at least 1")
    if sorted(set(args.loads)) != args.loads:
        raise ValueError(f"--loads: {args.loads} must ascend; sort them")
    caps = [f"batchwise:{k}" for k in range(1, args.tokens + 1)]
    runs = argparse.Namespace(**(vars(args) | {"policies": caps}))
    check(runs)
    return runs


def conclude(record: dict[str, Any], loads: list[int]) -> None:
    """Put the measured table of `loads`, the fastest caps and both schedules into the record."""
    table: dict[int, dict[int, list[float]]] = {load: {} for load in loads}
    for run in record["runs"]:
        if run["load"] in table:
            cap = int(run["policy"].removeprefix("batchwise:"))
            table[run["load"]].setdefault(cap, []).append(run["output_throughput"])
    means = {
        load: {cap: statistics.fmean(table[load][cap]) for cap in sorted(table[load])}
        for load in table
    }
    caps = fastest_caps(means)
    ranges = merged(caps)
    record["table"] = {str(n): {str(k): v for k, v in by.items()} for n, by in means.items()}
    record["fastest"] = {str(load): cap for load, cap in caps.items()}
    record["batchwise_schedule"] = our_schedule(ranges)
    record["num_speculative_tokens_per_batch_size"] = vllm_schedule(ranges)


def calibrate_batchwise(args: argparse.Namespace) -> dict[str, Any]:
    """Run what is missing, write the schedule, return the record."""
    runs = with_caps(args)
    new = {
        "schema": 1, "workload": "batchwise", **settings(args, *SETTINGS),
        "provenance": provenance(args), "runs": [],
    }  # fmt: skip
    record = held_record(args.out, new)
    plan = planned(runs)
    todo = missing(record, plan)
    print(f"{len(plan) - len(todo)} of {len(plan)} runs are done", flush=True)
    if todo:
        workload = read_workload(args.prompts)
        prompts = prepare(args, workload)
        record["left_out"] = dict(workload.dropped)
        started = time.perf_counter()
        llm = start_engine(args, prefix_caching=False)
        record.setdefault("ready_s", time.perf_counter() - started)
        loop = ClosedLoop(llm, prompts, args.max_tokens, args.temperature)
        # A full batch has to be prefilled before the window opens.
        run_all(runs, record, todo, llm,
                lambda load: loop.run(load, args.warm_up + load / 64, args.seconds))  # fmt: skip
    conclude(record, args.loads)
    save(record, args.out)
    return record


def main(arguments: list[str] | None = None) -> None:
    """Run it as the command line says."""
    parser = argparse.ArgumentParser(prog="forespark calibrate batchwise", description=__doc__)
    add_engine_arguments(parser)
    add_run_arguments(parser, repeats=1)
    parser.set_defaults(policies=["batchwise"], loads=[1, 8, 32, 128, 256])
    record = calibrate_batchwise(parser.parse_args(arguments))
    print(f"batchwise_schedule: {record['batchwise_schedule']}")
    print(f"vLLM: {record['num_speculative_tokens_per_batch_size']}")


if __name__ == "__main__":
    main()

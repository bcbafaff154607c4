"""`forespark profile check`: the price of every step against what it took, in a closed loop.

One engine, one policy, the loads one after another. Writes the shares of the measured time by which
predictions are off, what profiling added to the start, and what loading an artifact takes instead.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from forespark.benchmarks import step_times
from forespark.benchmarks.closed_loop import ClosedLoop, start
from forespark.benchmarks.engine import add_engine_arguments, between, counters
from forespark.benchmarks.held import save
from forespark.benchmarks.provenance import provenance

from forespark.config_sections import ESTIMATOR_POLICIES

FIGURES = ("median_abs_error", "p90_abs_error", "median_error", "steps", "measured_ms", "fixed_ms")


def check_arguments(args: argparse.Namespace) -> None:
    """ValueError, one line, for a run without prices to check."""
    if args.method != "forespark":
        raise ValueError(f"--method: {args.method} predicts no step time; only forespark does")
    if len(args.policies) != 1 or args.policies[0] not in ESTIMATOR_POLICIES:
        raise ValueError(
            f"--policies: {','.join(args.policies)} must be one of the policies that price their "
            f"steps: {', '.join(ESTIMATOR_POLICIES)}"
        )
    if len(set(args.loads)) != len(args.loads):
        raise ValueError(f"--loads: {args.loads} names a load twice; give each once")


def check_prices(args: argparse.Namespace) -> dict[str, Any]:
    """Start the engine, run every load, return the record (written after each load)."""
    check_arguments(args)
    llm, prompts = start(args)
    begun = llm.collective_rpc(step_times.startup)[0]
    if begun is None:
        raise ValueError(
            "--target: with it nothing is trimmed, so no step has a price; the log says why"
        )
    record: dict[str, Any] = {
        "schema": 1, "policy": args.policies[0], "tokens": args.tokens, "seconds": args.seconds,
        **{name: {} for name in FIGURES}, "standing_ratio": {},
        **begun, "provenance": provenance(args),
    }  # fmt: skip
    loop = ClosedLoop(llm, prompts, args.max_tokens)
    for load in args.loads:
        # A full batch has to be prefilled before the window opens.
        loop.fill(load, args.warm_up + load / 64)
        before = counters(llm)
        llm.collective_rpc(step_times.watch)
        loop.keep(args.seconds)
        rows = llm.collective_rpc(step_times.take)[0]
        seen = between(before, counters(llm))
        loop.drain()
        found = step_times.errors(rows, load)
        for name in FIGURES:
            record[name][str(load)] = found[name]
        predicted = seen["forespark:predicted_ms"]
        record["standing_ratio"][str(load)] = (
            seen["forespark:measured_ms"] / predicted if predicted else None
        )
        save(record, args.out)
        print(line(record, load, rows), flush=True)
    return record


def line(record: dict[str, Any], load: int, rows: list[dict[str, float]]) -> str:
    """One row of the table."""
    at = {name: record[name][str(load)] for name in FIGURES}
    return (
        f"{record['policy']:>22} load {load:4d}: off by {at['median_abs_error']:6.1%} "
        f"(p90 {at['p90_abs_error']:.1%}, signed {at['median_error']:+.1%}) of "
        f"{at['measured_ms']:.2f} ms, {at['fixed_ms']:.2f} ms learned; {at['steps']} steps, "
        f"drafted {statistics.mean(row['drafted'] for row in rows):.1f}, "
        f"verified {statistics.mean(row['verified'] for row in rows):.1f}"
    )


def main(arguments: list[str] | None = None) -> None:
    """Run it as the command line says."""
    parser = argparse.ArgumentParser(prog="forespark profile check", description=__doc__)
    add_engine_arguments(parser)
    parser.set_defaults(loads=[1, 32, 256], seconds=60.0)
    args = parser.parse_args(arguments)
    record = check_prices(args)
    print(
        f"profiling took {record['startup_extra_s']:.1f} s of the start; loading an artifact takes "
        f"{record['load_s']:.3f} s"
    )


if __name__ == "__main__":
    main()

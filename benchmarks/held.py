"""Output files that are continued: finished runs stay, runs of other settings are never mixed in.

A record is written whole after every run, under a temporary name first, so that a killed benchmark
leaves what it had measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from forespark.benchmarks.engine import use_policy
from forespark.training.saving import replacing

MEASURED = ("runs", "methods", "provenance", "ready_s", "drafts", "left_out")
ORIGIN = ("target", "drafter", "device", "commit")
Key = tuple[int, str, int]  # repeat, policy, load


def settings(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """These arguments as JSON; of a path the file's name."""
    values = {name: getattr(args, name) for name in names}
    return {name: v.name if isinstance(v, Path) else v for name, v in values.items()}


def held_record(out: Path, new: dict[str, Any]) -> dict[str, Any]:
    """The record in `out`, or `new` without one. ValueError when it is of other settings."""
    if not out.exists():
        return new
    try:
        held = json.loads(out.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--out: {out} cannot be continued ({error}); rename it") from None
    if not isinstance(held, dict):
        raise ValueError(f"--out: {out} holds no record of runs; rename it")
    other = [key for key in new if key not in MEASURED and held.get(key) != new[key]]
    origin = held.get("provenance") or {}
    other += [key for key in ORIGIN if origin.get(key) != new["provenance"].get(key)]
    if other:
        raise ValueError(f"--out: {out} holds runs of another {', '.join(other)}; rename it")
    return new | held


def save(record: dict[str, Any], out: Path) -> None:
    """Write the record; NaN is refused."""
    with replacing(out) as temporary:
        temporary.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


def planned(args: argparse.Namespace) -> list[Key]:
    """Every run that `args` ask for, a whole repeat before the next."""
    policies = args.policies if args.method == "forespark" else [args.method]
    return list(dict.fromkeys(itertools.product(range(args.repeats), policies, args.loads)))


def missing(record: dict[str, Any], plan: Iterable[Key]) -> list[Key]:
    """What of the plan the record does not hold."""
    held = {(run.get("repeat", 0), run["policy"], run["load"]) for run in record["runs"]}
    return [key for key in plan if key not in held]


def run_all(
    args: argparse.Namespace,
    record: dict[str, Any],
    todo: list[Key],
    llm: Any,
    measure: Callable[[int], dict[str, Any]],
) -> None:
    """`measure(load)` for every run to do, saved one by one. RuntimeError for a dead engine."""
    from vllm.v1.engine.exceptions import EngineDeadError

    for number, (repeat, policy, load) in enumerate(todo, start=1):
        try:
            if args.method == "forespark":
                llm.collective_rpc(use_policy, args=(policy,))
            run = measure(load)
        except EngineDeadError as error:
            raise RuntimeError(
                f"the engine died at {policy}, load {load}; {args.out} keeps "
                f"{len(record['runs'])} finished runs, and the same command goes on from there"
            ) from error
        record["runs"].append({"policy": policy, "repeat": repeat, **run})
        save(record, args.out)
        print(
            f"[{number}/{len(todo)}] {policy:>22} load {load:4d} repeat {repeat + 1}: "
            f"{run['output_throughput']:9.1f} tokens/s, {run['tokens_per_user']:7.1f} a user",
            flush=True,
        )


def guarded(main: Callable[[], None]) -> None:
    """Run a command; what it refuses or loses is one line."""
    try:
        main()
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"error: {error}")

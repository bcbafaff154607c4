"""`forespark profile step`: device time by stage at fixed loads, for every policy.

One engine serves all ForeSpark policies in turn; stock vLLM (`--method dflash_adaptive`, `dflash`)
and the target alone (`off`) take an engine each and are timed by the same marks. Prints a table,
writes one JSON record and, with `--picture`, the stages stacked over the load.

`--verify-per-req B` makes every method verify B drafted tokens a request in each step, so that
step times differ by machinery alone.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from forespark.benchmarks import stages
from forespark.benchmarks.closed_loop import ClosedLoop, add_engine_arguments, start, use_policy
from forespark.benchmarks.engine import cache_room
from forespark.benchmarks.provenance import provenance


def profile(args: argparse.Namespace) -> dict[str, Any]:
    """Start the engine, run every policy at every load, return the record."""
    started = time.perf_counter()
    llm, prompts = start(args)
    record: dict[str, Any] = {
        "method": args.method,
        "verify_per_req": args.verify_per_req,
        "ready_s": time.perf_counter() - started,
        "additional_config": args.additional_config,
        "cache_room": llm.collective_rpc(cache_room)[0],
        "provenance": provenance(args),
        "rows": [],
    }
    print("cache room: {tokens:.0f} tokens, {requests:.1f} requests".format(**record["cache_room"]))
    loop = ClosedLoop(llm, prompts, args.max_tokens)
    for policy in args.policies if args.method == "forespark" else [args.method]:
        if args.method == "forespark":
            llm.collective_rpc(use_policy, args=(policy,))
        for load in args.loads:
            loop.fill(load, args.warm_up + load / 64)
            llm.collective_rpc(stages.watch, args=(args.verify_per_req,))
            loop.keep(args.seconds)
            seen = llm.collective_rpc(stages.take)[0]
            loop.drain()
            row = {"policy": policy, "load": load, **stages.summary(seen, load)}
            record["rows"].append(row)
            print(line(row), flush=True)
            args.out.write_text(json.dumps(record, indent=1, allow_nan=False))
    return record


def line(row: dict[str, Any]) -> str:
    """One row of the table: the step, the target's tokens, then every stage in ms."""
    shown = " ".join(f"{stage} {row[stage]:.3f}" for stage in stages.STAGES if row[stage])
    return (
        f"{row['policy']:>22} n {row['load']:4d}: step {row['step']:8.3f} ms of "
        f"{row['tokens']:6.0f} tokens | {shown} | {row['steps']:.0f} steps"
    )


def draw(record: dict[str, Any], picture: Path) -> None:
    """Stages stacked over the load, one panel a policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    policies = list(dict.fromkeys(row["policy"] for row in record["rows"]))
    figure, axes = pyplot.subplots(
        1, len(policies), figsize=(3.2 * len(policies) + 2, 4), sharey=True, squeeze=False
    )
    for axis, policy in zip(axes[0], policies, strict=True):
        rows = [row for row in record["rows"] if row["policy"] == policy]
        bottom = [0.0] * len(rows)
        for stage in stages.STAGES:
            height = [row[stage] for row in rows]
            axis.bar([str(row["load"]) for row in rows], height, bottom=bottom, label=stage)
            bottom = [low + more for low, more in zip(bottom, height, strict=True)]
        axis.set(title=policy, xlabel="requests")
    axes[0][0].set_ylabel("ms a step, median by stage")
    axes[0][-1].legend(fontsize=7, loc="upper left")
    about = record["provenance"]
    figure.suptitle(f"{about['target']}, {about['device']}, commit {about['commit']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Run it as the command line says."""
    parser = argparse.ArgumentParser(prog="forespark profile step", description=__doc__)
    add_engine_arguments(parser)
    parser.add_argument("--verify-per-req", type=float, help="force that verification budget")
    parser.add_argument("--picture", type=Path, help="also draw the stages (PNG)")
    args = parser.parse_args(arguments)
    record = profile(args)
    if args.picture is not None:
        draw(record, args.picture)


if __name__ == "__main__":
    main()

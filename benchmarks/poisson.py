"""Open loop: seeded Poisson arrivals against `vllm serve`, and the rate that 90 % of users survive.

Every method gets the same prompts at the same times (vLLM's own client, `vllm bench serve`, makes
them from the seed). A rate is warmed up for `--warm-up` seconds and measured for `--seconds`. Rates
that the output file holds are not run again; a file of other settings is never continued.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from forespark.benchmarks.engine import STOCK
from forespark.benchmarks.held import guarded, held_record, save, settings
from forespark.benchmarks.provenance import provenance
from forespark.benchmarks.slo import LEVEL, Slo, attainment, capacity, latencies
from forespark.benchmarks.workloads import read_workload

from forespark.demo.server import Server, ServerError, vllm_command

SCALES = (0.5, 0.75, 1.0, 1.5, 2.0)
SETTINGS = ("tokens", "max_tokens", "seconds", "warm_up", "seed", "prompts", "server")
KEPT = ("completed", "failed", "duration", "request_throughput", "output_throughput",
        "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")  # fmt: skip


def speculative(method: str, drafter: Path, tokens: int) -> list[str]:
    """Server flags of a method: `off`, one of `STOCK`, or a ForeSpark policy.

    `batchwise:N` drafts N tokens for everyone.
    """
    base: dict[str, Any] = {"model": str(drafter), "num_speculative_tokens": tokens}
    if method == "off":
        return []
    if method in STOCK:
        base |= STOCK[method]
    else:
        policy, _, length = method.partition(":")
        scheduler: dict[str, Any] = {"policy": policy}
        if length:
            scheduler["batchwise_schedule"] = [[10**6, int(length)]]
        base |= {"method": "forespark", "scheduler": scheduler}
    return ["--speculative-config", json.dumps(base)]


def client(
    server: Server, args: argparse.Namespace, prompts: Path, rate: float, seconds: float, seed: int
) -> dict[str, Any]:
    """One run of vLLM's client: its record, with details."""
    with tempfile.TemporaryDirectory() as folder:
        count = max(1, round(rate * seconds))
        command = [
            *vllm_command(), "bench", "serve", "--backend", "openai", "--base-url", server.url,
            "--endpoint", "/v1/completions", "--model", "model", "--tokenizer", str(args.target),
            "--dataset-name", "custom", "--dataset-path", str(prompts),
            "--custom-output-len", str(args.max_tokens), "--num-prompts", str(count),
            "--request-rate", str(rate), "--seed", str(seed), "--temperature", "0",
            "--percentile-metrics", "ttft,tpot", "--save-result", "--save-detailed",
            "--result-dir", folder, "--result-filename", "run.json", "--disable-tqdm",
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, check=False,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        file = Path(folder) / "run.json"
        if done.returncode or not file.exists():
            raise RuntimeError(f"the client ended with {done.returncode}:\n{done.stderr[-2000:]}")
        record: dict[str, Any] = json.loads(file.read_text())
        return record


def measured(record: dict[str, Any], rate: float, slo: Slo) -> dict[str, Any]:
    """What is kept of a run: vLLM's figures and the attainment at several scales of the limits."""
    ttft, _ = latencies(record)
    return {
        "rate": rate,
        "requests": int(ttft.size),
        **{name: record[name] for name in KEPT if name in record},
        "attainment": {str(scale): attainment(record, slo.scaled(scale)) for scale in SCALES},
    }


def main() -> None:
    args = _arguments()
    slo = Slo(args.ttft, args.tpot)
    new = {
        "workload": "poisson", "ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms, "level": LEVEL,
        **settings(args, *SETTINGS), "provenance": provenance(args), "methods": {},
    }  # fmt: skip
    held = held_record(args.out, new)
    workload = read_workload(args.prompts)
    print(workload.summary(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        lines = (json.dumps({"prompt": text}) + "\n" for text in workload.texts)
        prompts.write_text("".join(lines), encoding="utf-8")
        for method in args.methods:
            found = held["methods"].setdefault(method, {"runs": []})
            done = [run["rate"] for run in found["runs"]]
            todo = [rate for rate in args.rates if rate not in done]
            if not todo:
                continue
            flags = speculative(method, args.drafter, args.tokens) + args.server
            log = args.out.with_name(f"{args.out.stem}-{method.replace(':', '-')}.log")
            try:
                with Server(args.target, flags, log) as server:
                    print(f"{method}: ready after {server.wait_ready():.0f} s", flush=True)
                    for rate in todo:
                        run = one_rate(server, args, prompts, rate, slo)
                        _keep(held, found, run, args.out)
                        print(f"{method:>22} {_line(run)}", flush=True)
            except (RuntimeError, ServerError) as error:
                raise RuntimeError(
                    f"{method}: {error}\n{args.out} keeps what was measured, and the same command "
                    "goes on from there"
                ) from error
    capacities = {name: found.get("capacity") for name, found in held["methods"].items()}
    print(json.dumps({"capacity": capacities}))


def one_rate(
    server: Server, args: argparse.Namespace, prompts: Path, rate: float, slo: Slo
) -> dict[str, Any]:
    """Warm up, then measure one rate. RuntimeError when the client or the server ended."""
    if args.warm_up:
        client(server, args, prompts, rate, args.warm_up, args.seed + 1)
    return measured(client(server, args, prompts, rate, args.seconds, args.seed), rate, slo)


def _keep(held: dict[str, Any], found: dict[str, Any], run: dict[str, Any], out: Path) -> None:
    found["runs"].append(run)
    rates = [one["rate"] for one in found["runs"]]
    most, exact = capacity(rates, [one["attainment"]["1.0"] for one in found["runs"]])
    found |= {"capacity": most, "capacity_measured": exact}
    save(held, out)


def _line(run: dict[str, Any]) -> str:
    return (
        f"{run['rate']:7.2f} requests/s: {run['attainment']['1.0']:6.1%} in time, "
        f"TTFT {run['median_ttft_ms']:.0f} ms, TPOT {run['median_tpot_ms']:.1f} ms"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=15, help="K")
    parser.add_argument(
        "--methods", type=lambda s: s.split(","), default=["joint", "off", "dflash_adaptive"]
    )
    parser.add_argument(
        "--rates", type=lambda s: [float(r) for r in s.split(",")], required=True, help="requests/s"
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--warm-up", type=float, default=30.0)
    parser.add_argument("--ttft", type=float, default=1000.0, help="limit in ms")
    parser.add_argument("--tpot", type=float, default=50.0, help="limit in ms")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args, args.server = parser.parse_known_args()  # the rest goes to `vllm serve`
    return args


if __name__ == "__main__":
    guarded(main)

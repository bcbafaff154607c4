"""A shape with random weights behind `vllm serve`, and many requests at once: does it all complete?

Prints one JSON line last: completed and failed requests, output tokens/s, ForeSpark's own counters.
Random weights accept almost nothing, so this says whether a load is served, not how fast a real
model would be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
from forespark.benchmarks.shapes import HYBRID, QWEN3, write_pair

from forespark.demo.server import Server

SHOWN = ("steps", "drafted_tokens", "verified_tokens", "accepted_tokens", "emitted_tokens")


async def _one(
    session: aiohttp.ClientSession, url: str, index: int, prompt_tokens: int, max_tokens: int
) -> int:
    """Output tokens of one completion, -1 when it failed."""
    body = {
        "model": "model",
        "prompt": [4 + (index * 37 + i * 11) % 2000 for i in range(prompt_tokens)],
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        if reply.status != 200:
            return -1
        return int((await reply.json())["usage"]["completion_tokens"])


async def _load(url: str, args: argparse.Namespace) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=args.timeout)
    connector = aiohttp.TCPConnector(limit=args.concurrency)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await _one(session, url, 0, args.prompt_tokens, 8)
        started = time.perf_counter()
        done = await asyncio.gather(
            *(
                _one(session, url, i, args.prompt_tokens, args.max_tokens)
                for i in range(args.requests)
            ),
            return_exceptions=True,
        )
        seconds = time.perf_counter() - started
        async with session.get(f"{url}/metrics") as reply:
            metrics = await reply.text()
    tokens = [n for n in done if isinstance(n, int) and n >= 0]
    counters = {
        line.split("{")[0].split(" ")[0].removeprefix("forespark:"): float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith("forespark:") and "_total" in line and "position" not in line
    }
    return {
        "completed": len(tokens),
        "failed": len(done) - len(tokens),
        "output_throughput": sum(tokens) / seconds,
        "duration": seconds,
        "forespark": {name: counters.get(f"{name}_total", 0.0) for name in SHOWN},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted({**QWEN3, **HYBRID}), default="qwen3-8b")
    parser.add_argument("--tokenizer", type=Path, default=Path("tests/assets/tiny-pair/target"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/forespark-shapes"))
    parser.add_argument("--policy", default="joint")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--graphs", action="store_true", help="let vLLM compile and capture graphs")
    args = parser.parse_args()
    target, drafter = write_pair(args.work, args.shape, args.tokenizer, device="cuda")
    speculative = {
        "method": "forespark",
        "model": str(drafter),
        "scheduler": {"policy": args.policy},
        "draft_load_config": {"load_format": "safetensors"},
    }
    options = ["--load-format", "dummy", "--max-model-len", "4096", "--max-num-seqs", "128"]
    options += ["--max-num-batched-tokens", "8192", "--speculative-config", json.dumps(speculative)]
    if not args.graphs:
        options.append("--enforce-eager")
    log = args.work / "server.log"
    with Server(target, options, log) as server:
        try:
            ready = server.wait_ready()
            result = asyncio.run(_load(server.url, args))
        finally:
            print("\n".join(log.read_text().splitlines()[-25:]), file=sys.stderr)
    gpu = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True
    )
    shape = {"shape": args.shape, "policy": args.policy, "graphs": args.graphs, "ready_s": ready}
    print(json.dumps({**shape, "gpu": gpu.stdout.strip(), **result}))
    return 0 if result["failed"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())

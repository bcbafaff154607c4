"""`forespark bench NAME ...`: every benchmark by its name, each with its own `--help`."""

from __future__ import annotations

import difflib
import runpy
import sys

PACKAGE = "forespark.benchmarks"
NAMES = {
    "decode": ("closed_loop", "fixed loads in a closed loop, policy after policy"),
    "sharegpt-decode": ("batch_decode", "batches that decode together, behind a barrier"),
    "e2e": ("e2e", "multi-turn conversations in a closed loop, policy after policy"),
    "compare": ("compare", "records of `decode` side by side: table, ratios, picture"),
    "report": ("report", "every figure, one HTML page and the committed figures, from raw runs"),
    "simulate": ("simulate", "any policy on recorded drafts and a latency table"),
    "oracle": ("oracle", "joint against a plan that knows the acceptance, on recorded drafts"),
    "validate": ("validate", "the simulator's throughput ratios against a real run's"),
    "inflate": ("inflate", "a small trained pair inside a large architecture"),
    "shape": ("shapes", "a pair of a large shape, hybrid ones too, with random weights"),
    "drafter-cost": ("drafter_cost", "what a draft costs, ours and vLLM's"),
    "poisson": ("poisson", "Poisson arrivals against a server, attainment and capacity"),
    "serve-load": ("serve_load", "many requests at once against `vllm serve`"),
    "host": ("host_decision", "what the host's decision costs and gives up"),
    "kernels": ("kernels.run", "the Triton kernels (needs a GPU)"),
    "speed": ("speed", "the committed figures on what a step costs, from raw records"),
    "smoke": ("smoke", "every workload and figure on the tiny pair"),
}


def run(arguments: list[str]) -> None:
    """Run the benchmark that the first argument names. ValueError for an unknown name."""
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, NAMES))
        print("usage: forespark bench NAME [options]; NAME --help shows its options\n")
        print("\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in NAMES.items()))
        return
    name, *rest = arguments
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(NAMES)}"
        raise ValueError(f"bench: unknown benchmark {name!r}; {hint}")
    module = f"{PACKAGE}.{NAMES[name][0]}"
    sys.argv = [f"forespark bench {name}", *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)

"""`forespark profile`: start the engine once, measure, and write the latency artifact.

Takes vLLM's own engine flags, so that what is measured is what will be served:

    forespark profile --model MODEL --speculative-config forespark.yaml --out latency.json

`latency.artifact: latency.json` in the settings then spares every later start the measurement.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from forespark.core import LatencyTable
from forespark.scheduler.latency import save_artifact


def main(arguments: list[str]) -> Path:
    """Write the artifact of the engine that `arguments` describe; return its path.

    Raises ValueError when the settings start nothing that has prices.
    """
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # to send `export_prices` to the worker
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from forespark.verifier.export import export_prices

    parser = FlexibleArgumentParser(prog="forespark profile", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="artifact (JSON) to write")
    parser = EngineArgs.add_cli_args(parser)
    args = parser.parse_args(arguments)
    out = args.out
    engine = EngineArgs.from_cli_args(args)
    llm = vllm.LLM(**{name: getattr(engine, name) for name in engine.__dataclass_fields__})
    record = llm.collective_rpc(export_prices)[0]
    if record is None:
        raise ValueError(
            "profile: these settings measure nothing; use method forespark with scheduler.policy "
            "joint, single_curve or adaptive_verification and without latency.artifact"
        )
    if record["busy"] is not None:
        raise ValueError(record["busy"])
    draft, verify = (
        LatencyTable(t["sizes"], t["ms"], t["captured_limit"])
        for t in (record["draft"], record["verify"])
    )
    provenance = {"command": " ".join(["forespark profile", *arguments]), "python": sys.version}
    save_artifact(out, draft, verify, record["identity"], provenance)
    print(
        f"latency artifact: {out} ({draft.sizes.size} draft and {verify.sizes.size} verify sizes)"
    )
    return out

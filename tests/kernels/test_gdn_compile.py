"""The machine code of `gdn_verify` and `gdn_commit` for Hopper, compiled without a GPU.

The interpreter cannot show that a kernel spills, moves its state 4 bytes at a time, or does not
compile at all. The compiler runs in a process of its own, since this one interprets kernels.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

SIZES = {"H": 16, "HV": 32, "K": 128, "V": 128, "EPS": 1e-6, "TOKENS": 16, "UPCAST": False}
PLAIN = ("scale", "norm_eps", "slots_stride", "rows")  # everything else is a multiple of 16


def compile_kernel(kernel, types, constants, num_warps):
    """Registers, stack and counts of instructions of one kernel for sm_90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    divisible = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): divisible for name in types if name not in PLAIN},
    )
    target = GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": num_warps})
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        dump = [
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True)
            for option in ("--dump-resource-usage", "-sass")
        ]
    usage, code = (result.stdout for result in dump)
    patterns = {"store_16": r"STG\.E\.128", "barrier": r"BAR\.SYNC", "spill": r"\bSTL"}
    counts = {name: len(re.findall(pattern, code)) for name, pattern in patterns.items()}
    registers, stack = re.search(r"REG:(\d+).*?STACK:(\d+)", usage).groups()
    return {"registers": int(registers), "stack": int(stack), **counts}


def report():
    """One record per kernel, with the launch that the wrappers choose."""
    from forespark.triton_kernels import gdn_commit, gdn_verify

    floats = "qkv out k gate norm a b", "a_log dt_bias state z g"
    verify = {f"{name}_ptr": "*bf16" for name in floats[0].split()}
    verify |= {f"{name}_ptr": "*fp32" for name in floats[1].split()}
    verify |= {f"{name}_ptr": "*i32" for name in ("slots", "cu", "slot_kept", "width_kept")}
    strides = ("qkv_stride", "a_stride", "b_stride", "state_stride", "slots_stride", "gate_stride")
    verify |= {**dict.fromkeys(strides, "i32"), "scale": "fp32", "norm_eps": "fp32"}
    commit = {"pointers_ptr": "*i64", "strides_ptr": "*i64", "k_ptr": "*bf16", "rows": "i32"}
    commit |= dict.fromkeys(("z_ptr", "g_ptr", "like_ptr"), "*fp32")
    commit |= dict.fromkeys(("accepted_ptr", "slot_ptr", "width_ptr"), "*i32")
    tiles = {"BLOCK_K": gdn_verify.BLOCK_K, "STAGES": gdn_verify.STAGES, "TERMS": 3, **SIZES}
    plain = {"BLOCK_V": gdn_verify.BLOCK_V, "NORM": False, **tiles}
    norm = {"BLOCK_V": 128, "NORM": True, **tiles}
    rebuild = {"BLOCK_V": gdn_commit.BLOCK_V, "TERMS": 3, **SIZES}
    return {
        "verify": compile_kernel(gdn_verify._gdn_verify_kernel, verify, plain, 4),
        "norm": compile_kernel(gdn_verify._gdn_verify_kernel, verify, norm, 8),
        "commit": compile_kernel(gdn_commit._gdn_commit_kernel, commit, rebuild, 4),
    }


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_compile_for_hopper(tmp_path):
    """Catches spills, registers that leave room for one program on an SM, narrow state stores."""
    root = Path(__file__).resolve().parents[2]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    command = [sys.executable, __file__]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    kernels = json.loads(result.stdout.splitlines()[-1])
    for name, kernel in kernels.items():
        assert kernel["spill"] == kernel["stack"] == 0, (name, kernel)
        assert kernel["registers"] <= 200 and kernel["barrier"] <= 50, (name, kernel)
    # 32 rows of 128 float32 over 128 threads: eight stores of 16 bytes each.
    assert kernels["commit"]["store_16"] == 8


if __name__ == "__main__":
    if find_spec("forespark.triton_kernels") is None:  # a plain checkout, nothing installed
        import forespark

        forespark.__path__.append(str(Path(__file__).resolve().parents[2]))
    print(json.dumps(report()))

"""CPU mode: vLLM's V2 model runner, DFlash2 and variable-length verification without a GPU.

`enable()` is called by the plugin in every process and does nothing unless vLLM's platform is a
CPU.

How it works. On a CPU vLLM 0.32 finds no Triton backend and replaces `triton.jit` by a decorator
that returns the plain function. Every kernel on the V2 runner's path is then given a torch
implementation through vLLM's own `register_kernels` (`kernels.py` is the list), so neither the
Triton interpreter nor a compiler is involved. The few checks and stand-ins that assume a GPU are
patched one by one (`host_patches.py` in every process, `worker_patches.py` in workers); each
patch names what it changes.
"""

from __future__ import annotations


def is_cpu_platform() -> bool:
    """Whether vLLM resolved its platform to a CPU in this process."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def enable() -> bool:
    """Turn CPU mode on in this process; False (and nothing done) on any other platform."""
    if not is_cpu_platform():
        return False
    from forespark.cpu_mode.host_patches import host_patches

    for patch in host_patches():
        patch.apply()
    return True

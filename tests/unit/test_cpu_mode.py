"""CPU mode as a whole: inert elsewhere, idempotent, every kernel fits its upstream launch."""

from __future__ import annotations

import importlib
import inspect
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from forespark import cpu_mode
from forespark.cpu_mode import companions, metadata_alias
from forespark.cpu_mode.events import HostEvent
from forespark.cpu_mode.host_patches import check_adaptive_verification
from forespark.patching import applied_patches

vllm_platforms = pytest.importorskip("vllm.platforms", reason="needs vLLM")
needs_cpu_vllm = pytest.mark.skipif(
    not cpu_mode.is_cpu_platform(), reason="needs the CPU build of vLLM"
)


class FakePlatform:
    def __init__(self, cpu: bool) -> None:
        self.cpu = cpu

    def is_cpu(self) -> bool:
        return self.cpu


def test_enable_does_nothing_on_another_platform(monkeypatch):
    """Catches CPU stand-ins reaching a GPU server."""
    monkeypatch.setattr(vllm_platforms, "current_platform", FakePlatform(cpu=False), raising=False)
    before = len(applied_patches())
    assert cpu_mode.enable() is False
    assert len(applied_patches()) == before


@needs_cpu_vllm
def test_enable_twice_applies_each_patch_once():
    """Catches wrappers wrapping themselves when a plugin is loaded again."""
    assert cpu_mode.enable()
    before = [(entry.patch.name, entry.original) for entry in applied_patches()]
    assert cpu_mode.enable()
    assert [(entry.patch.name, entry.original) for entry in applied_patches()] == before
    assert all(entry.patch.reason for entry in applied_patches())


def _upstream(name: str):
    """The Triton kernel behind a registered name, as the plain function it is without Triton."""
    module, attribute = name.rsplit(".", 1)
    kernel = getattr(importlib.import_module(module), attribute)
    dispatcher = importlib.import_module("vllm.triton_utils.dispatcher")
    return dispatcher._registry[name][0] if name in dispatcher._registry else kernel


@needs_cpu_vllm
def test_every_kernel_takes_what_upstream_launches():
    """Catches an argument added, removed or renamed upstream."""
    from vllm.triton_utils import tl

    from forespark.cpu_mode.kernels import KERNELS

    for name, impl in KERNELS.items():
        theirs = inspect.signature(_upstream(name)).parameters.values()
        constexpr = (tl.constexpr, "tl.constexpr")  # a string under postponed annotations
        run_time = [p.name for p in theirs if p.annotation not in constexpr]
        constants = {p.name for p in theirs if p.annotation in constexpr}
        ours = inspect.signature(impl).parameters.values()
        positional = [p for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
        tensors = [p for p in positional if p.default is inspect.Parameter.empty]
        keywords = {p.name for p in positional if p.default is not inspect.Parameter.empty}
        assert len(tensors) == len(run_time), (name, run_time)
        assert keywords <= constants, (name, keywords - constants)


class Record:
    def __init__(self, **fields) -> None:
        self.__dict__.update(fields)


@pytest.mark.parametrize(
    ("lora", "stages", "message"), [(object(), 1, "LoRA"), (None, 2, "pipeline_parallel_size 2")]
)
def test_what_adaptive_verification_cannot_do_is_refused(lora, stages, message):
    """Catches the CPU check dropping upstream's other refusals with the graph one."""
    config = Record(
        speculative_config=Record(enable_adaptive_verification=True),
        lora_config=lora,
        parallel_config=Record(pipeline_parallel_size=stages),
    )
    with pytest.raises(ValueError, match=message):
        check_adaptive_verification(config)
    config.speculative_config.enable_adaptive_verification = False
    check_adaptive_verification(config)


def test_host_events_measure_elapsed_time():
    """Catches step timings that are zero or need a GPU."""
    start, end = HostEvent(enable_timing=True), HostEvent()
    start.record()
    with pytest.raises(RuntimeError, match="both events"):
        start.elapsed_time(end)
    end.record()
    assert start.query() and 0.0 <= start.elapsed_time(end) < 1e3


def test_the_metadata_alias_comes_and_goes(monkeypatch, tmp_path):
    """Catches an alias over a real vllm, and the removal of somebody else's metadata."""

    def no_vllm(_name):
        raise PackageNotFoundError

    monkeypatch.setattr(metadata_alias, "version", no_vllm)
    monkeypatch.setattr(metadata_alias, "cpu_distribution", lambda: (tmp_path, "0.32.0"))
    folder = metadata_alias.write_alias()
    assert folder == tmp_path / "vllm-0.32.0.dist-info"
    # The platform check looks for "cpu" in the version of the distribution named vllm.
    assert "Version: 0.32.0+cpu\n" in (folder / "METADATA").read_text()
    monkeypatch.setattr(metadata_alias, "version", lambda _name: "0.32.0")
    assert metadata_alias.write_alias() is None
    (folder / "INSTALLER").write_text("pip\n")
    assert metadata_alias.remove_alias() is None and folder.is_dir()
    (folder / "INSTALLER").write_text("forespark\n")
    assert metadata_alias.remove_alias() == folder and not folder.exists()


def test_only_companions_that_fail_to_import_are_uninstalled(monkeypatch):
    """Catches a working torchvision being removed."""
    calls = []
    monkeypatch.setattr(companions, "is_installed", lambda name: name != "torchcodec")
    monkeypatch.setattr(companions, "imports_cleanly", lambda name: name == "torchaudio")
    monkeypatch.setattr(companions.subprocess, "run", lambda args, **_: calls.append(args))
    assert companions.remove_broken_torchvision() == ["torchvision"]
    assert calls[0][-1] == "torchvision" and "uninstall" in calls[0]


@needs_cpu_vllm
def test_norms_match_their_definition():
    """Catches the C++ norms reading strided or per-head inputs wrongly."""
    from forespark.cpu_mode.norms import fused_add_rms_norm, rms_norm

    vllm_platforms.current_platform.import_kernels()
    generator = torch.Generator().manual_seed(0)
    wide, weight = torch.randn(5, 3, 128, generator=generator), torch.rand(64, generator=generator)
    x = wide[..., :64]
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (64,), weight, 1e-5)
    )
    x, residual = x.reshape(-1, 64).clone(), torch.randn(15, 64, generator=generator)
    total = x + residual
    normed, kept = fused_add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(kept, total)
    torch.testing.assert_close(
        normed, torch.nn.functional.rms_norm(total, (64,), weight, 1e-5), rtol=1e-5, atol=1e-5
    )

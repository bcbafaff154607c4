"""Puts ForeSpark's parts into a vLLM worker: called from the patches of `forespark.patches`."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator

from forespark import __version__
from forespark.config import ForeSparkConfig
from forespark.core import LatencyTable
from forespark.drafter.fingerprint import weights_fingerprint
from forespark.drafter.planner import StepPlanner
from forespark.drafter.requests import RequestLimits, wants_drafts
from forespark.drafter.speculator import ForeSparkSpeculator
from forespark.drafter.warm_up import warm_up_planning
from forespark.metrics import MetricsWriter, stats_path
from forespark.scheduler.correction import SurvivalCorrection
from forespark.scheduler.fixed_cost import FixedCost
from forespark.scheduler.latency import load_artifact
from forespark.scheduler.policies import make_policy
from forespark.scheduler.selection import SelectionModel
from forespark.scheduler.trace import TraceWriter
from forespark.verifier.agreement import check_agreement, parts_of
from forespark.verifier.full_block import FullBlockSpeculator
from forespark.verifier.lengths import Split, split_for
from forespark.verifier.manager import ForeSparkManager
from forespark.verifier.observe import Observer
from forespark.verifier.profile import busy, measure_tables

logger = logging.getLogger("vllm.forespark")


def make_speculator(
    vllm_config: Any, device: torch.device, config: ForeSparkConfig
) -> DFlash2Speculator:
    """The speculator of this policy: packed drafts, or stock full blocks with counters."""
    if config.trims_verification:
        return ForeSparkSpeculator(vllm_config, device, config)
    return FullBlockSpeculator(vllm_config, device)


def attach_manager(runner: Any, config: ForeSparkConfig) -> None:
    """Our manager, once the attention backends are known: they say who may decide lengths."""
    speculator = runner.speculator
    if not isinstance(speculator, ForeSparkSpeculator):
        return
    where = split_for(config.scheduler.split, [*runner.attn_groups, *speculator.attn_groups])
    speculator.host_split = where is Split.HOST
    if where is Split.NONE:
        runner.adaptive_verification = None
    elif where is Split.HOST or runner.adaptive_verification is not None:
        # Lengths decided on the device need what the stock manager has checked; it may be absent.
        runner.adaptive_verification = ForeSparkManager(runner, speculator)


def finish_start(runner: Any, config: ForeSparkConfig) -> None:
    """Measure or load the prices and start planning; the engine is warm by now."""
    speculator = runner.speculator
    steps = runner.speculative_config.num_speculative_tokens if speculator is not None else 0
    observer = _observer(runner, config, steps)
    if isinstance(speculator, FullBlockSpeculator):
        check_agreement(get_tp_group(), parts_of(config, None, None, {}))
        speculator.feedback.observer = observer
        return
    if not isinstance(speculator, ForeSparkSpeculator):
        return
    if runner.adaptive_verification is None:
        # Without trimming the speculator keeps drafting full blocks (and has said why).
        speculator.feedback.observer = observer
        if observer is not None:
            observer.set_trimming(False)
        return
    draft = verify = None
    if config.needs_prices:
        started = time.perf_counter()
        if config.latency.artifact is not None:
            draft, verify = load_artifact(config.latency.artifact, artifact_identity(runner))
        else:
            tables = measure_tables(runner, speculator, runner.adaptive_verification.captured_sizes)
            # One rank's clock decides for all: different prices would be different plans.
            draft, verify = get_tp_group().broadcast_object(tables, src=0)
            if (line := busy(speculator)) is not None:
                logger.warning("ForeSpark %s", line)
        speculator.pricing_s = time.perf_counter() - started
        _say_prices(draft, verify)
    weights = {} if speculator.estimators is None else speculator.estimators.tensors()
    check_agreement(get_tp_group(), parts_of(config, draft, verify, weights))
    start_planning(runner, config, draft, verify)
    warm_up_planning(speculator)
    speculator.feedback.observer = observer
    if observer is not None and draft is not None and verify is not None:
        observer.set_trimming(not (draft.is_flat or verify.is_flat))


def start_planning(
    runner: Any, config: ForeSparkConfig, draft: LatencyTable | None, verify: LatencyTable | None
) -> None:
    """Plan from now on as `config` says; no request may be running."""
    speculator, settings = runner.speculator, config.scheduler
    steps = speculator.num_speculative_steps
    policy = make_policy(
        settings.policy,
        draft,
        verify,
        settings.min_gain,
        config.batchwise_ranges(steps),
        SelectionModel() if settings.selection == "learned" else None,
    )
    if speculator.estimators is not None:
        speculator.estimators.single_curve = settings.policy == "single_curve"
    speculator.prices = (draft, verify)
    speculator.planner = StepPlanner(
        policy,
        RequestLimits(runner.max_num_reqs, steps, runner.max_model_len),
        runner.max_num_reqs,
        steps,
        settings.prior_acceptance,
        settings.min_draft_len,
        FixedCost() if config.latency.fixed_cost == "learned" else None,
        clock_of_rank_0=speculator.ranks.several,
        host_split=speculator.host_split,
        correction=SurvivalCorrection(steps) if settings.correction == "learned" else None,
    )


def after_admission(runner: Any, scheduler_output: Any) -> None:
    """Once new requests have their slots: who opted out. On an idle step: the last results."""
    speculator = runner.speculator
    if scheduler_output.total_num_scheduled_tokens == 0:
        if isinstance(speculator, ForeSparkSpeculator | FullBlockSpeculator):
            speculator.take_in()
        return
    planner = getattr(speculator, "planner", None)
    if planner is None:
        return
    for request in scheduler_output.scheduled_new_reqs:
        params = request.sampling_params
        if params is not None and not wants_drafts(params.extra_args):
            slot = runner.req_states.req_id_to_index[request.req_id]
            planner.admit(slot, int(runner.req_states.max_seq_len[slot]), enabled=False)


def artifact_identity(runner: Any) -> dict[str, Any]:
    """What a latency artifact must have been measured with to be valid here."""
    import vllm

    config = runner.vllm_config
    device = torch.cuda.get_device_name(runner.device) if runner.device.type == "cuda" else "cpu"
    return {
        "model": config.model_config.model,
        "drafter": config.speculative_config.model,
        "drafter_weights": weights_fingerprint(config.speculative_config.model),
        "device": device,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "num_speculative_tokens": config.speculative_config.num_speculative_tokens,
        "largest_captured_size": config.compilation_config.max_cudagraph_capture_size or 0,
        "vllm": vllm.__version__,
        "forespark": __version__,
    }


def _observer(runner: Any, config: ForeSparkConfig, steps: int) -> Observer | None:
    if get_tp_group().rank_in_group != 0 or runner.speculator is None:
        return None
    path = stats_path(runner.vllm_config.additional_config)
    metrics = None if path is None else MetricsWriter(path, config.scheduler.policy, steps)
    trace = None if config.observe.trace is None else TraceWriter(config.observe.trace)
    return Observer(steps, metrics, trace, config.observe.trace_arrays)


def _say_prices(draft: Any, verify: Any) -> None:
    for name, table in (("draft", draft), ("verify", verify)):
        shown = ", ".join(f"{s}: {m:.2f}" for s, m in zip(table.sizes, table.ms, strict=True))
        logger.info("ForeSpark %s latency (ms by tokens, %s): %s", name, table.source, shown)
        if table.is_flat:
            logger.warning(
                "ForeSpark: the %s latency table (%s) is flat: no budget looks expensive, so "
                "nothing is trimmed; profile this machine again",
                name, table.source,
            )  # fmt: skip

"""The sections of `forespark.yaml`: scheduler, latency, drafter, observe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Policy = Literal["off", "full", "batchwise", "adaptive_verification", "single_curve", "joint"]
ESTIMATOR_POLICIES = ("adaptive_verification", "single_curve", "joint")
TRIMMING_POLICIES = ("batchwise", *ESTIMATOR_POLICIES)
"""Policies with fewer than K tokens in a draft or a verification."""


def _unquoted_off(value: object) -> object:
    # YAML 1.1 reads a bare `off` as false.
    return "off" if value is False else value


class Section(BaseModel):
    """Base of every part of the schema: unknown keys refused, no silent conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SchedulerSettings(Section):
    """How many tokens are drafted and verified in a step."""

    policy: Annotated[Policy, BeforeValidator(_unquoted_off)] = Field(
        default="joint",
        description="off: target alone. full: K drafted, K verified. batchwise: a draft length by "
        "batch size. adaptive_verification: K drafted, verification trimmed. single_curve: joint "
        "with one acceptance curve for every length. joint: draft and verification lengths chosen "
        "together before drafting.",
    )
    min_gain: float = Field(
        default=0.02,
        ge=0.0,
        lt=1.0,
        allow_inf_nan=False,
        description="A plan other than full blocks must promise at least this much more goodput "
        "(relative) than full blocks.",
    )
    min_draft_len: int = Field(
        default=0,
        ge=0,
        description="Tokens every request drafts at least while anything is drafted in the step.",
    )
    selection: Literal["learned", "none"] = Field(
        default="learned",
        description="joint and single_curve. learned: a plan counts on verification picking the "
        "best drafted tokens; how much that is worth is learned while serving. none: the paper's "
        "rule, which expects of every token what was estimated before drafting.",
    )
    split: Literal["auto", "device", "host"] = Field(
        default="auto",
        description="Who turns a step's budgets into a length for every request. device: the GPU, "
        "by this step's estimates. host: the CPU, by the previous step's, for attention backends "
        "that plan a step from lengths on the host. auto: host if an attention backend needs it.",
    )
    correction: Literal["learned", "none"] = Field(
        default="none",
        description="joint, single_curve and adaptive_verification. learned: expected acceptance "
        "follows what the workload at hand accepts, one factor a draft position, learned while "
        "serving from verified tokens. none: as the checkpoint was calibrated.",
    )
    prior_acceptance: float = Field(
        default=0.6,
        gt=0.0,
        lt=1.0,
        allow_inf_nan=False,
        description="Acceptance assumed at every position before the first step's scores exist.",
    )
    batchwise_schedule: list[list[int]] | None = Field(
        default=None,
        description="Only with policy batchwise: pairs [n, k], ascending n, 'up to n decoding "
        "requests draft k tokens'; larger batches take the last k. null: [[8, K], [32, K/2], "
        "[128, K/4], [512, 1]], rounded down, at least 1.",
    )

    @model_validator(mode="after")
    def _check_correction(self) -> SchedulerSettings:
        if self.correction == "learned" and self.policy not in ESTIMATOR_POLICIES:
            raise ValueError(
                f"correction: learned has no effect with policy {self.policy}, which expects "
                f"nothing of a token; use one of {', '.join(ESTIMATOR_POLICIES)}, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> SchedulerSettings:
        pairs = self.batchwise_schedule
        if pairs is None:
            return self
        if self.policy != "batchwise":
            raise ValueError(
                f"batchwise_schedule: {pairs} has no effect with policy {self.policy}; "
                "use policy: batchwise or leave it out"
            )
        if not pairs or any(len(pair) != 2 for pair in pairs):
            raise ValueError(f"batchwise_schedule: {pairs} must be pairs [requests, tokens]")
        counts = [pair[0] for pair in pairs]
        if counts[0] < 1 or any(a >= b for a, b in zip(counts, counts[1:], strict=False)):
            raise ValueError(
                f"batchwise_schedule: request counts {counts} must be >= 1 and ascending"
            )
        if any(pair[1] < 0 for pair in pairs):
            raise ValueError(f"batchwise_schedule: {pairs} drafts fewer than 0 tokens")
        return self


class LatencySettings(Section):
    """Where the prices of drafting and verifying come from."""

    artifact: str | None = Field(
        default=None,
        description="Latency artifact (JSON) measured for this model, drafter and machine.",
    )
    profile: Literal["startup", "never"] = Field(
        default="startup",
        description="startup: measure when the server starts (not when an artifact is given). "
        "never: only an artifact.",
    )
    fixed_cost: Literal["learned", "none"] = Field(
        default="learned",
        description="learned: while serving, add what decode-only steps take beyond the tables to "
        "the price of a step. none: the tables alone.",
    )


class DrafterSettings(Section):
    """How the drafter runs, independent of the target."""

    kv_cache_dtype: str = Field(
        default="auto",
        description="KV cache dtype of the drafter; auto: the drafter's own dtype, never "
        "inherited from a quantised target cache.",
    )
    attention_backend: str | None = Field(
        default=None,
        description="Attention backend of the drafter (it must be non-causal); null: chosen.",
    )


class ObserveSettings(Section):
    """What is recorded about each step."""

    trace: str | None = Field(
        default=None, description="JSONL file that receives every step's decision."
    )
    trace_arrays: bool = Field(
        default=False,
        description="Also record score arrays, which `forespark explain` needs for pictures.",
    )

    @model_validator(mode="after")
    def _check_trace(self) -> ObserveSettings:
        if self.trace_arrays and self.trace is None:
            raise ValueError("trace_arrays: True has no file to go to; set observe.trace")
        return self

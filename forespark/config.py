"""The one schema of `forespark.yaml`: loads it, checks it, prints its reference.

The file is flat, like vLLM's own speculative config: `method: forespark` plus the drafter, K and
four sections. `to_vllm()` is the part vLLM reads, `settings()` the part that travels to every
worker process.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from forespark.config_io import (
    ConfigError,
    existing_path,
    explain,
    read_mapping,
    reference_lines,
)
from forespark.config_sections import (
    ESTIMATOR_POLICIES,
    TRIMMING_POLICIES,
    DrafterSettings,
    LatencySettings,
    ObserveSettings,
    SchedulerSettings,
    Section,
)
from forespark.drafter_config import read_drafter

METHOD = "forespark"
SETTINGS_ABI = 1
"""Changes whenever the compiled graphs of the drafter change: part of vLLM's compile-cache key."""

_ELSEWHERE = {
    "num_speculative_tokens_per_batch_size": "use scheduler.policy: batchwise with "
    "scheduler.batchwise_schedule",
    "enable_adaptive_verification": "scheduler.policy decides it",
    "tensor_parallel_size": "use draft_tensor_parallel_size",
    "use_local_argmax_reduction": "the acceptance estimate needs the draft logits; leave it out",
    "parallel_drafting": "the drafter always drafts in parallel; leave it out",
}


class ForeSparkConfig(Section):
    """Everything a user can set, as written in `forespark.yaml`."""

    method: Literal["forespark"] = Field(default="forespark", description="Always forespark.")
    model: str | None = Field(
        default=None,
        description="Drafter checkpoint: a folder (relative to this file, then to the working "
        "directory) or a hub id. Only policy off works without one.",
    )
    num_speculative_tokens: int | None = Field(
        default=None,
        ge=1,
        description="K, the longest draft; null: what the checkpoint was trained for.",
    )
    scheduler: SchedulerSettings = Field(
        default=SchedulerSettings(), description="How long drafts and verification are."
    )
    latency: LatencySettings = Field(
        default=LatencySettings(), description="What drafting and verifying cost."
    )
    drafter: DrafterSettings = Field(default=DrafterSettings(), description="How the drafter runs.")
    observe: ObserveSettings = Field(default=ObserveSettings(), description="What is recorded.")
    draft_sample_method: Literal["greedy", "probabilistic"] = Field(
        default="probabilistic",
        description="How drafts are sampled when temperature > 0. probabilistic samples the "
        "drafter's distribution and verifies the ratio of probabilities; it keeps K rows of "
        "float32 draft logits per request. greedy drafts the best token and needs no such memory. "
        "Both keep the target's distribution; greedy requests are the same either way.",
    )
    rejection_sample_method: Literal["standard", "block", "synthetic"] = Field(
        default="standard",
        description="standard: lossless, token by token. block: lossless, whole blocks, only with "
        "policy full. synthetic: accepts at a given rate, for benchmarks only.",
    )
    synthetic_acceptance_rates: list[float] | None = Field(
        default=None,
        description="Only with synthetic: chance that the first 1, 2, ... K are accepted.",
    )
    synthetic_acceptance_length: float | None = Field(
        default=None, description="Only with synthetic: mean tokens per step, 1 to K + 1."
    )
    draft_tensor_parallel_size: int | None = Field(
        default=None,
        ge=1,
        description="Tensor parallel size of the drafter: 1, or the target's (null).",
    )
    quantization: str | None = Field(
        default=None, description="Quantisation of the drafter's weights."
    )
    draft_load_config: dict[str, Any] | None = Field(
        default=None,
        description="How the drafter's weights are loaded, as vLLM's load config "
        "(for example {load_format: safetensors}); null: as the target's.",
    )
    revision: str | None = Field(default=None, description="Hub revision of the drafter.")
    code_revision: str | None = Field(
        default=None, description="Hub revision of the drafter's code."
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        description="Longest context the drafter serves; beyond it nothing is drafted.",
    )
    disable_eagle_block_drop: bool = Field(
        default=False, description="Keep the last prefix-cache block (vLLM's experimental switch)."
    )

    @model_validator(mode="after")
    def _check_together(self) -> ForeSparkConfig:
        policy = self.scheduler.policy
        if policy != "off" and not self.model:
            raise ValueError(
                f"model: missing, and policy {policy} needs a drafter; "
                "name a checkpoint, or set scheduler.policy: off"
            )
        if (
            policy in ESTIMATOR_POLICIES
            and self.latency.artifact is None
            and self.latency.profile == "never"
        ):
            raise ValueError(
                f"latency.profile: 'never' without latency.artifact leaves policy {policy} "
                "without prices; set profile: startup or name an artifact"
            )
        if policy in TRIMMING_POLICIES and self.rejection_sample_method == "block":
            raise ValueError(
                f"rejection_sample_method: 'block' judges whole drafts, but policy {policy} "
                "trims them; use standard, or policy full"
            )
        tokens = self.num_speculative_tokens
        if tokens is not None:
            self.check_tokens(tokens)
        return self

    def check_tokens(self, tokens: int) -> None:
        """Raise ValueError when another setting asks for more than `tokens` = K."""
        if self.scheduler.min_draft_len > tokens:
            raise ValueError(
                f"scheduler.min_draft_len: {self.scheduler.min_draft_len} is more than "
                f"num_speculative_tokens ({tokens}); use 0..{tokens}"
            )
        longest = max((pair[1] for pair in self.scheduler.batchwise_schedule or []), default=0)
        if longest > tokens:
            raise ValueError(
                f"scheduler.batchwise_schedule: drafts {longest}, more than "
                f"num_speculative_tokens ({tokens}); use 0..{tokens}"
            )

    @property
    def trims_verification(self) -> bool:
        """Whether the policy may draft or verify fewer than K tokens of a request."""
        return self.scheduler.policy in TRIMMING_POLICIES

    @property
    def needs_estimators(self) -> bool:
        """Whether the policy needs a checkpoint with estimators."""
        return self.scheduler.policy in ESTIMATOR_POLICIES

    @property
    def needs_prices(self) -> bool:
        """Whether the policy weighs tokens against step latencies."""
        return self.scheduler.policy in ESTIMATOR_POLICIES

    def batchwise_ranges(self, num_speculative_tokens: int) -> tuple[tuple[int, int, int], ...]:
        """Inclusive (first batch, last batch, k) ranges, with the default filled in for K."""
        longest = num_speculative_tokens
        pairs = self.scheduler.batchwise_schedule or [
            [8, longest],
            [32, max(1, longest // 2)],
            [128, max(1, longest // 4)],
            [512, 1],
        ]
        firsts = [1, *(last + 1 for last, _ in pairs)]
        return tuple((first, pair[0], pair[1]) for first, pair in zip(firsts, pairs, strict=False))

    def with_tokens(self, tokens: int) -> ForeSparkConfig:
        """The same settings with K filled in (checks them against it)."""
        if tokens == self.num_speculative_tokens:
            return self
        return type(self).from_any({**self.model_dump(), "num_speculative_tokens": tokens})

    @classmethod
    def from_any(cls, value: str | Path | Mapping[str, Any] | ForeSparkConfig) -> ForeSparkConfig:
        """Settings from a YAML path, inline JSON text or a mapping; ConfigError says what is wrong.

        Paths become absolute: the drafter and the artifact against the YAML's folder, then the
        working directory; the trace against the working directory.
        """
        if isinstance(value, ForeSparkConfig):
            return value
        mapping, folder = read_mapping(value)
        if "method" not in mapping:
            raise ConfigError("method: missing; write method: forespark")
        if mapping["method"] != METHOD:
            raise ConfigError(
                f"method: got {mapping['method']!r}; these keys are read with method: forespark"
            )
        try:
            config = cls.model_validate(mapping)
        except ValidationError as error:
            raise explain(error, cls, _ELSEWHERE) from None
        return config._with_paths(folder)

    def _with_paths(self, folder: Path | None) -> ForeSparkConfig:
        latency, observe = self.latency, self.observe
        if latency.artifact is not None:
            artifact = existing_path(latency.artifact, folder)
            if not Path(artifact).is_file():
                raise ConfigError(
                    f"latency.artifact: {latency.artifact} is not a file; give the path of a "
                    "latency artifact, or leave it out to measure at start-up"
                )
            latency = latency.model_copy(update={"artifact": artifact})
        if observe.trace is not None:
            trace = str(Path(observe.trace).expanduser().absolute())
            observe = observe.model_copy(update={"trace": trace})
        model = None if self.model is None else existing_path(self.model, folder)
        return self.model_copy(update={"model": model, "latency": latency, "observe": observe})

    def to_vllm(self) -> dict[str, Any] | None:
        """Keyword arguments of vLLM's SpeculativeConfig, or None when nothing is drafted."""
        if self.scheduler.policy == "off":
            return None
        tokens = self.num_speculative_tokens
        if tokens is None and self.model is not None and Path(self.model).is_dir():
            tokens = read_drafter(Path(self.model)).default_tokens
        kv_cache_dtype = self.drafter.kv_cache_dtype
        given = {
            "method": "dflash",
            "model": self.model,
            "num_speculative_tokens": tokens,
            "enable_adaptive_verification": self.trims_verification,
            "attention_backend": self.drafter.attention_backend,
            "kv_cache_dtype": None if kv_cache_dtype == "auto" else kv_cache_dtype,
        } | {key: getattr(self, key) for key in _PASSED_ON}
        return {key: item for key, item in given.items() if item is not None}

    def settings(self) -> dict[str, Any]:
        """Everything, JSON-serialisable, for `VllmConfig.additional_config["forespark"]`."""
        return {"abi": SETTINGS_ABI, **self.model_dump(mode="json")}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> ForeSparkConfig:
        """The inverse of `settings()`, in a worker process."""
        return cls.from_any({key: item for key, item in settings.items() if key != "abi"})


_PASSED_ON = (
    "draft_sample_method",
    "rejection_sample_method",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
    "draft_tensor_parallel_size",
    "quantization",
    "draft_load_config",
    "revision",
    "code_revision",
    "max_model_len",
    "disable_eagle_block_drop",
)


def is_forespark(value: object) -> bool:
    """Whether a speculative config (YAML path, JSON text, mapping) is meant for ForeSpark."""
    if isinstance(value, ForeSparkConfig):
        return True
    if not isinstance(value, str | Path | Mapping):
        return False
    mapping, _ = read_mapping(value)
    method = mapping.get("method")
    if method == METHOD:
        return True
    misspelt = isinstance(method, str) and difflib.SequenceMatcher(None, method, METHOD).ratio()
    sections = {"scheduler", "latency", "drafter", "observe"}
    return bool(sections & mapping.keys()) or bool(misspelt and misspelt > 0.7)


def reference_yaml() -> str:
    """A commented `forespark.yaml` with every key at its default."""
    head = "# forespark.yaml: every key and its default. Only method and model are needed."
    body = reference_lines(ForeSparkConfig, {"method": METHOD, "model": "path-or-hub-id"})
    return "\n".join([head, *body]) + "\n"


def reference_page() -> str:
    """The content of docs/config.md."""
    return _PAGE.format(reference=reference_yaml())


_PAGE = """\
# Settings

Written by `forespark config --page`; do not edit. Use the file as
`vllm serve MODEL --speculative-config forespark.yaml`, the same keys as inline JSON, as dotted
flags (`--speculative-config.scheduler.policy full`), or as a dict or path in
`LLM(speculative_config=...)`. `forespark config check FILE` checks a file without starting a
server. An unknown key, a wrong type or a combination that cannot work stops the server with one
line that names the key, the value and what works.

```yaml
{reference}```
"""

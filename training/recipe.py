"""The training recipe: one YAML file, unknown keys refused with the nearest known one."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PromptConfig(_Section):
    """Where prompts come from, and how many are held out."""

    source: str = Field(description="`stdlib`, or a ShareGPT JSON, JSONL, .gz or .whl file.")
    heldout_source: str | None = Field(
        default=None, description="Separate file of held-out prompts; else the first `heldout`."
    )
    train: int = Field(default=10**9, ge=1, description="Training conversations at most.")
    heldout: int = Field(
        default=2000,
        ge=1,
        description="Held-out conversations; about 60 drafts of the evaluation come from one.",
    )
    max_prompt_tokens: int = Field(default=512, ge=1)


class GenerateConfig(_Section):
    """How the target answers the prompts."""

    engine: Literal["hf", "vllm"] = "hf"
    max_new_tokens: int = Field(default=256, ge=2)
    temperature: float = Field(default=0.7, ge=0, description="For `sampled_share` of prompts.")
    sampled_share: float = Field(default=0.0, ge=0, le=1, description="The rest is greedy.")
    system: str | None = Field(default=None, description="System message of every prompt.")
    batch_size: int = Field(default=96, ge=1, description="Prompts at a time (engine hf).")
    max_num_seqs: int = Field(default=1024, ge=1, description="Sequences at a time (vllm).")
    seconds: float | None = Field(default=None, gt=0, description="Stop generating after this.")
    seed: int = 0


class DrafterConfig(_Section):
    """The drafter to start from, or the sizes of a fresh one."""

    init: str | None = Field(default=None, description="Checkpoint folder to start from.")
    freeze: bool = Field(default=False, description="Train only the estimators.")
    block_size: int = Field(default=16, ge=2, description="K + 1.")
    num_layers: int = Field(default=3, ge=1)
    aux_layers: list[Annotated[int, Field(ge=0)]] = Field(
        default=[], description="Target layer ids (speculators')."
    )
    mask_token_id: int = Field(default=0, ge=0)
    intermediate_size: int | None = Field(default=None, ge=1)
    conv_kernel_size: int = Field(default=2, ge=1)
    conv_group_size: int = Field(default=16, ge=1)
    selector_rank: int = Field(default=64, ge=1)
    selector_top_k: int = Field(default=8, ge=1)
    train_mask_embedding: bool = False


class EstimatorConfig(_Section):
    """Sizes and losses of both estimators (section 4.5)."""

    rank: int = Field(default=256, ge=1)
    directional: bool = False
    lambda_pre: float = Field(default=1.0, ge=0)
    lambda_post: float = Field(default=0.1, ge=0)
    label_temperature: float = Field(
        default=1.0, ge=0, description="Temperature of P and Q in the labels; 0 is greedy."
    )


class TrainConfig(_Section):
    """Optimisation: by steps (repeatable) or by minutes (time-boxed)."""

    steps: int | None = Field(default=None, ge=1)
    minutes: float | None = Field(default=None, gt=0)
    batch_size: int = Field(default=8, ge=1, description="Documents a step.")
    anchors: int = Field(default=48, ge=1, description="Anchors a document.")
    lr: float = Field(default=6e-4, gt=0)
    warmup_steps: int = Field(default=50, ge=0)
    final_lr_share: float = Field(default=0.02, ge=0, le=1)
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    gamma: float = Field(default=4.0, gt=0, description="Decay of the position weights.")
    selector_weight: float = 1.0
    loss: str = '{"ce": 0.1, "tv": 0.9}'
    loss_implementation: Literal["auto", "fused", "eager"] = "auto"
    normalize_features: bool = True
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    cache_gib: float = Field(default=2.0, ge=0, description="Memory for target features.")
    checkpoint_steps: int = Field(default=500, ge=1)
    log_steps: int = Field(default=20, ge=1)
    curve_points: int = Field(default=10, ge=0, description="Held-out measurements on the way.")
    curve_documents: int = Field(default=48, ge=1)
    seed: int = 0
    tensorboard: bool = True


class EvaluateConfig(_Section):
    """Full-block evaluation on held-out prompts."""

    max_documents: int = Field(default=10**9, ge=1)
    anchors: int = Field(default=32, ge=1, description="Blocks drafted at a time per document.")
    lengths: list[int] = Field(default=[], description="Draft lengths also run; empty: all.")
    length_stride: int = Field(default=4, ge=1, description="Anchors between shorter drafts.")
    engine_prompts: int = Field(default=0, ge=0, description="Prompts for vLLM's own measurement.")
    engine_max_tokens: int = 256
    engine_num_seqs: int = 32


class Recipe(_Section):
    """Everything one training run needs."""

    target: str
    target_name: str = Field(description="How the checkpoint names its target.")
    workdir: str
    prepared_in: str | None = Field(
        default=None, description="Workdir whose prepared set is used; else this one's."
    )
    prompts: PromptConfig
    generate: GenerateConfig = GenerateConfig()
    drafter: DrafterConfig = DrafterConfig()
    estimators: EstimatorConfig = EstimatorConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()

    @property
    def prepared(self) -> Path:
        """Folder of the prepared set."""
        return Path(self.prepared_in or self.workdir) / "prepared"

    @property
    def checkpoint(self) -> Path:
        """Folder of the served checkpoint."""
        return Path(self.workdir) / "checkpoint"

    @property
    def state(self) -> Path:
        """File of the exact training state."""
        return Path(self.workdir) / "state.pt"


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Recipe of a YAML file, with `section.key=value` overrides; ValueError in one line."""
    try:
        record = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"recipe: {path} cannot be read ({reason})") from None
    if not isinstance(record, dict):
        raise ValueError(f"recipe: {path} holds {type(record).__name__}, not a mapping")
    for override in overrides or []:
        _apply(record, override)
    try:
        recipe = Recipe.model_validate(record)
    except ValidationError as error:
        raise ValueError(_explain(path, error)) from None
    if recipe.train.steps is None and recipe.train.minutes is None:
        raise ValueError(f"train: {path} sets neither train.steps nor train.minutes; set one")
    return recipe


def _apply(record: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator:
        raise ValueError(f"override: {override!r} has no '='; write section.key=value")
    *sections, last = key.split(".")
    for section in sections:
        record = record.setdefault(section, {})
        if not isinstance(record, dict):
            raise ValueError(f"override: {override!r}: {section} is a value, not a section")
    try:
        record[last] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ValueError(f"override: {override!r}: {value!r} is not a YAML value") from None


def _explain(path: str | Path, error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        model: Any = Recipe
        for part in first["loc"][:-1]:
            model = model.model_fields[part].annotation
        near = difflib.get_close_matches(str(first["loc"][-1]), model.model_fields, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(model.model_fields)}"
        return f"{where}: unknown key in {path}; {hint}"
    return f"{where}: {first['msg']} (got {first.get('input')!r}) in {path}"

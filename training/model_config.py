"""The speculators model type `forespark`: DFlash2's configuration plus the estimators' sizes.

A saved folder names itself `dflash2`, so that stock vLLM and stock speculators accept it; the
estimators' sizes live in `estimators/config.json` beside it (see `forespark.training.folder`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from speculators import SpeculatorModelConfig, reload_schemas
from speculators.models.dflash2 import DFlash2SpeculatorConfig


@SpeculatorModelConfig.register("forespark")
class ForeSparkSpeculatorConfig(DFlash2SpeculatorConfig):
    """DFlash2 drafter with a pre-draft and a post-draft acceptance estimator (section 4)."""

    speculators_model_type: Literal["forespark"] = "forespark"  # type: ignore[assignment]
    architectures: list[str] = Field(default_factory=lambda: ["DFlash2DraftModel"])
    estimator_rank: int = Field(
        default=256, ge=1, description="Width r of the pre-draft estimator's hidden layer."
    )
    directional: bool = Field(
        default=False,
        description="Causal attention inside the block: K logits instead of K(K+1)/2.",
    )
    train_mask_embedding: bool = Field(
        default=False,
        description="Learn the mask embedding (shipped as mask_embedding.pt) instead of using "
        "the target's embedding of mask_token_id.",
    )

    @property
    def num_speculative_tokens(self) -> int:
        """K: slots of a block after the anchor."""
        return self.block_size - 1

    def drafter_dict(self) -> dict[str, object]:
        """This configuration as a plain `dflash2` one, the form written to config.json."""
        record = self.to_diff_dict()
        for key in ("estimator_rank", "directional", "train_mask_embedding"):
            record.pop(key, None)
        record["speculators_model_type"] = "dflash2"
        return record


reload_schemas()

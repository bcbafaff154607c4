"""Which checkpoint drafts were recorded with, and whether it is the one being calibrated.

The hash of the drafter is not enough: estimators can be trained again without changing the drafter.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from forespark.estimators.checkpoint import FOLDER, drafter_sha256
from forespark.estimators.pre_draft import triangle_size


@dataclass(frozen=True)
class Origin:
    """The estimators behind a trace; K is the block they were trained for."""

    num_speculative_tokens: int
    directional: bool  # one row of z instead of a triangle
    drafter: str  # sha256 of the drafter's weights
    estimators: str  # sha256 of the estimators' weights; empty: not recorded

    @classmethod
    def of_checkpoint(cls, folder: Path) -> Origin:
        """Of a drafter's folder. Raises ValueError when it holds no whole `estimators/`."""
        root = folder / FOLDER
        try:
            config = json.loads((root / "config.json").read_text(encoding="utf-8"))
            weights = hashlib.sha256((root / "model.safetensors").read_bytes()).hexdigest()
            most, directional = int(config["num_speculative_tokens"]), bool(config["directional"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"checkpoint: {folder} has no estimators that can be read ({error}); name a "
                "drafter trained with them"
            ) from None
        return cls(most, directional, drafter_sha256(folder), weights)

    @property
    def entries(self) -> int:
        """Scales (and biases) that a calibration of these estimators has."""
        most = self.num_speculative_tokens
        return most if self.directional else triangle_size(most)

    def check(self, checkpoint: Origin) -> None:
        """ValueError naming the field in which a checkpoint differs from this trace's."""
        pairs = [
            ("num_speculative_tokens", self.num_speculative_tokens,
             checkpoint.num_speculative_tokens),
            ("recorded with drafter", self.drafter[:12] or "unknown", checkpoint.drafter[:12]),
        ]  # fmt: skip
        if self.estimators:
            pairs += [
                ("recorded with estimators", self.estimators[:12], checkpoint.estimators[:12]),
                ("directional", self.directional, checkpoint.directional),
            ]
        for name, own, other in pairs:
            if own != other:
                raise ValueError(
                    f"trace: {name} {own}, this checkpoint has {other}; collect again with it"
                )

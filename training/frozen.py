"""`forespark train estimators`: both estimators on a drafter that stays as it is.

The drafter runs without gradient, so a step costs little more than its forward passes and a short
run covers many anchors. The prepared set is the recipe's own; state, checkpoint and evaluation go
to `workdir/estimators-<name of the drafter's folder>`, so that a drafter's run is never touched.
"""

from __future__ import annotations

from pathlib import Path

from forespark.training.recipe import Recipe


def frozen_recipe(recipe: Recipe, drafter: Path) -> Recipe:
    """The recipe that trains estimators on `drafter`; ValueError when it is no drafter's folder."""
    drafter = drafter.resolve()
    if not (drafter / "config.json").is_file():
        raise ValueError(
            f"--drafter: {drafter} holds no config.json; give the folder of a trained drafter"
        )
    workdir = Path(recipe.workdir) / f"estimators-{drafter.name}"
    if drafter.is_relative_to(workdir.resolve()):
        raise ValueError(
            f"--drafter: {drafter} lies inside {workdir}, which this command writes; give the "
            "drafter's original folder"
        )
    # Sizes come from the folder, so none is named here.
    sections = {"drafter": type(recipe.drafter)(init=str(drafter), freeze=True)}
    return recipe.model_copy(
        update=sections
        | {"workdir": str(workdir), "prepared_in": recipe.prepared_in or recipe.workdir}
    )

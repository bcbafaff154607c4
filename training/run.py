"""Training from a recipe: build or load the model, train inside the box, leave a served folder."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forespark.training.curve import CurveRecorder, time_estimators
from forespark.training.folder import (
    build_model,
    fold_features,
    load_checkpoint,
    save_beside,
    save_checkpoint,
)
from forespark.training.history import History
from forespark.training.loader import TrainLoader
from forespark.training.model import ForeSparkDraftModel
from forespark.training.provenance import published_steps, write_provenance
from forespark.training.recipe import Recipe
from forespark.training.rows import load_rows, require
from forespark.training.saving import replacing
from forespark.training.schedule import Schedule
from forespark.training.target import Target
from forespark.training.trainer import ForeSparkTrainer, TrainingOver, library_fits
from speculators.train.logger import setup_metric_logger

Say = Callable[[str], None]
_SAMPLE_ROWS = 64  # documents that set the features' scale


def default_device() -> torch.device:
    """The GPU when there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def train(
    recipe: Recipe,
    *,
    box_minutes: float | None = None,
    device: torch.device | None = None,
    say: Say = print,
) -> bool:
    """Train until the recipe's schedule is done (True) or the box is over (False).

    Goes on from `workdir/state.pt` when it is there; always leaves `workdir/checkpoint`.
    """
    device = device or default_device()
    torch.manual_seed(recipe.train.seed)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        # The mask of packed blocks is dense: the memory-efficient kernel takes it, cuDNN's does not
        torch.backends.cuda.enable_cudnn_sdp(False)
    require(recipe.prepared, recipe.target, recipe.generate.model_dump())
    rows = load_rows(recipe.prepared, "train")
    model = make_model(recipe)
    dtype = torch.bfloat16 if recipe.train.dtype == "bfloat16" else torch.float32
    target = Target(recipe.target, model.target_layer_ids, device, dtype)
    loader = TrainLoader(
        rows,
        target,
        num_speculative_tokens=model.config.num_speculative_tokens,
        batch_size=recipe.train.batch_size,
        anchors=recipe.train.anchors,
        seed=recipe.train.seed,
        cache_bytes=int(recipe.train.cache_gib * 2**30),
    )
    if recipe.train.normalize_features and not recipe.drafter.freeze:
        fold_features(model, feature_scale(target, [r.input_ids for r in rows[:_SAMPLE_ROWS]]))
    if recipe.drafter.freeze:
        model.freeze_drafter()
    config = recipe.train
    schedule = Schedule(
        config.steps, config.minutes, config.warmup_steps, config.final_lr_share, box_minutes
    )
    workdir = Path(recipe.workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    history = History(workdir / "metrics.jsonl")
    backends = ["tensorboard"] if config.tensorboard else []
    setup_metric_logger(backends, run_name="train", output_dir=str(workdir / "tensorboard"))
    started = time.monotonic()

    heldout = load_rows(recipe.prepared, "heldout")[: config.curve_documents]
    points = 0 if recipe.drafter.freeze else config.curve_points
    curve = CurveRecorder(workdir / "curve.jsonl", model, target, heldout, points)

    def report(step: int) -> None:
        point = curve.maybe(schedule.progress(step), step, schedule.spent / 60)
        if point:
            say(point)
        if step % config.log_steps and step > 3:
            return
        left = schedule.seconds_left(step, trainer.first_step)
        say(f"step {step} {history.line()} {rate(step):.2f} steps/s, {left:.0f} s left")

    def rate(step: int) -> float:
        return (step - trainer.first_step) / max(1e-9, time.monotonic() - started)

    def publish() -> None:
        with replacing(recipe.checkpoint) as folder:
            if recipe.drafter.freeze and recipe.drafter.init:
                save_beside(model, recipe.drafter.init, folder)
            else:
                save_checkpoint(model, folder, verifier_name=recipe.target_name)
            write_provenance(folder, recipe, trainer, schedule)

    arguments = call_kwargs(recipe, device, say)
    trainer = ForeSparkTrainer(
        model,
        loader,
        config,
        schedule,
        device=device,
        state_file=recipe.state,
        call_kwargs=arguments,
        identity=state_identity(recipe),
        on_step=report,
        on_save=publish,
    )
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    say(
        f"train: {len(rows)} rows, {len(loader)} steps an epoch, {parameters} trained parameters, "
        f"from step {trainer.first_step} on {device}"
    )
    if schedule.done(trainer.global_step):
        if published_steps(recipe) != trainer.global_step:
            publish()  # a kill came between the last state and its checkpoint
        say("train: the schedule is already done")
        return True
    history.keep_before(trainer.first_step)
    logging.getLogger("speculators.metrics").addHandler(history)
    try:
        with library_fits(device):
            trainer.run_training()
    except TrainingOver as over:
        say(f"train: {over} at step {trainer.global_step}, {schedule.spent / 60:.1f} min trained")
        if over.finished and not recipe.drafter.freeze:
            timing = time_estimators(model, loader, arguments, say)
            (workdir / "timing.json").write_text(json.dumps(timing) + "\n")
        return over.finished
    finally:
        logging.getLogger("speculators.metrics").removeHandler(history)
    say(f"train: interrupted at step {trainer.global_step}; run again to go on")
    return False


def make_model(recipe: Recipe) -> ForeSparkDraftModel:
    """The recipe's drafter: a checkpoint to start from, or a fresh one."""
    drafter, rank = recipe.drafter, recipe.estimators.rank
    if drafter.init:
        learned = drafter.train_mask_embedding or None
        model = load_checkpoint(
            drafter.init, recipe.target, rank=rank, train_mask_embedding=learned
        )
        check_block_size(recipe, model, drafter.init)
        return model
    sizes = drafter.model_dump(exclude={"init", "freeze"})
    return build_model(recipe.target, rank=rank, directional=recipe.estimators.directional, **sizes)


def check_block_size(recipe: Recipe, model: ForeSparkDraftModel, folder: str | Path) -> None:
    """Refuse a recipe that names another K than the drafter in `folder` has."""
    drafter = recipe.drafter
    named = drafter.init is None or "block_size" in drafter.model_fields_set
    if named and drafter.block_size != model.block_size:
        raise ValueError(
            f"drafter.block_size: the recipe says {drafter.block_size}, the drafter in "
            f"{folder} has {model.block_size}; change it back, or start a fresh drafter in "
            "another workdir"
        )


def call_kwargs(recipe: Recipe, device: torch.device, say: Say = print) -> dict[str, Any]:
    """Arguments of the model's forward that the recipe sets."""
    config, estimators = recipe.train, recipe.estimators
    implementation = config.loss_implementation
    if implementation == "auto":
        implementation = "fused" if fused_losses_work(device, say) else "eager"
    return {
        "loss_fn": config.loss,
        "loss_implementation": implementation,
        "gamma": config.gamma,
        "selector_weight": config.selector_weight,
        "lambda_pre": estimators.lambda_pre,
        "lambda_post": estimators.lambda_post,
        "label_temperature": estimators.label_temperature,
    }


def fused_losses_work(device: torch.device, say: Say = print) -> bool:
    """True when speculators' Triton losses agree with its plain ones on this device."""
    if device.type != "cuda":
        return False
    from speculators.losses import resolve_loss_config

    logits, targets = torch.randn(2, 1, 32, 4096, device=device).bfloat16()
    try:
        for name in ("ce", "tv"):
            values = []
            for kind in ("fused", "eager"):
                leaf = logits.clone().requires_grad_()
                loss = resolve_loss_config(name, kind)[name][0](leaf, targets)
                loss.sum().backward()
                assert leaf.grad is not None
                values.append((loss.detach().float(), leaf.grad.float()))
            # bfloat16 logits: one rounding of a loss near 9 is 0.03
            torch.testing.assert_close(values[0], values[1], rtol=2e-2, atol=5e-2)
    except Exception as error:  # any failure of a compiler means: use the plain losses
        say(f"train: fused losses do not run here ({str(error).splitlines()[0]}); plain ones used")
        return False
    return True


def feature_scale(target: Target, documents: list[list[int]]) -> torch.Tensor:
    """1 / rms of every feature channel, position 0 (the attention sink) left out."""
    total, count = None, 0
    for ids in documents:
        features = target.features(torch.tensor([ids]))[0][0, 1:].float()
        squared = features.pow(2).sum(0)
        total = squared if total is None else total + squared
        count += features.shape[0]
    assert total is not None
    return (total / max(1, count) + 1e-8).rsqrt().cpu()


def state_identity(recipe: Recipe) -> dict[str, Any]:
    """What a resumed run must share with the one that wrote the state."""
    prepared = json.loads((recipe.prepared / "identity.json").read_text())
    record = {f"prepared.{key}": value for key, value in prepared.items()}
    for section in ("drafter", "estimators", "train"):
        values = getattr(recipe, section).model_dump()
        record |= {f"{section}.{key}": value for key, value in values.items()}
    for free in (
        "train.cache_gib",
        "train.checkpoint_steps",
        "train.log_steps",
        "train.curve_points",
    ):
        record.pop(free)
    return json.loads(json.dumps(record))

"""speculators' Trainer, run on a CPU or one GPU, with exact resume and a time box.

What it changes of speculators 0.9.0, and why:
- the device is given (the library asks for an accelerator and fails without one);
- the learning rate follows `Schedule`, which knows minutes as well as steps;
- the training state is one float32 file (the library rounds weights and moments to bfloat16, so a
  resumed run would differ), written under a temporary name and renamed;
- the pre-draft estimator's gradients are clipped on their own: inside the library's joint norm
  they would scale the drafter's update, and L_pre must not change the drafter (section 4.5).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import speculators.train.trainer as library
import torch
from forespark.training.loader import TrainLoader
from forespark.training.model import ForeSparkDraftModel
from forespark.training.recipe import TrainConfig
from forespark.training.saving import replacing
from forespark.training.schedule import Schedule
from speculators.train.trainer import Trainer, TrainerConfig

STATE_SCHEMA = 1
_CLIP_NORM = 1.0
_FROZEN = ("embed_tokens.", "lm_head.", "verifier_lm_head.", "verifier_norm.")


class TrainingOver(Exception):
    """Raised after a step to leave the library's epoch loop: `finished`, or the box is over."""

    def __init__(self, finished: bool) -> None:
        super().__init__("training finished" if finished else "time box over")
        self.finished = finished


class ForeSparkTrainer(Trainer):
    """Trains a `forespark` model from a `TrainLoader` until its `Schedule` is done."""

    def __init__(
        self,
        model: ForeSparkDraftModel,
        loader: TrainLoader,
        config: TrainConfig,
        schedule: Schedule,
        *,
        device: torch.device,
        state_file: Path,
        call_kwargs: dict[str, Any],
        identity: dict[str, Any],
        on_step: Callable[[int], None] | None = None,
        on_save: Callable[[], None] | None = None,
    ) -> None:
        self.device, self.settings, self.schedule = device, config, schedule
        self.state_file, self.identity = state_file, identity
        self.on_step, self.on_save = on_step, on_save
        self._pre_grads: dict[torch.nn.Parameter, torch.Tensor] = {}
        super().__init__(
            model,
            TrainerConfig(
                lr=config.lr,
                num_epochs=10**9,
                save_path=str(state_file.parent / "epochs"),
                train_call_kwargs=call_kwargs,
                scheduler_type="none",
                hidden_states_dtype=getattr(torch, config.dtype),
                log_freq=config.log_steps,
            ),
            loader,  # type: ignore[arg-type]
        )
        for parameter in model.pre_draft.parameters():
            parameter.register_post_accumulate_grad_hook(self._set_aside)

    def setup_trainer(self) -> None:
        """Device and counters; a state file decides where to go on."""
        self.local_rank, self.device_type = self.device, self.device.type  # type: ignore[assignment]
        self.best_val_loss = float("inf")
        self.state = self._read_state()
        self.current_epoch = self.state.get("epoch", 0)
        self._resume_local_step = self.state.get("local_step", 0)
        self.global_step = self.first_step = self.state.get("global_step", 0)

    def setup_model(self) -> None:
        """Move the model to the device and load the state's weights."""
        super().setup_model()
        if self.state:
            self.model.load_state_dict(self.state["model"], strict=False)

    def setup_optimizer(self) -> None:
        """AdamW with decay on matrices only; the moments of the state file, if there is one."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {
                "params": [p for p in trained if p.ndim >= 2],
                "weight_decay": self.settings.weight_decay,
            },
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=self.settings.lr,
            betas=self.settings.betas,
            fused=self.device.type == "cuda",
        )
        if self.state:
            optimizer.load_state_dict(self.state["optimizer"])
        self.optimizers, self.schedulers = [optimizer], []
        self.schedule.start(self.state.get("spent_seconds", 0.0))
        self._set_lr(self.global_step)

    def _set_lr(self, step: int) -> None:
        for group in self.optimizers[0].param_groups:
            group["lr"] = self.settings.lr * self.schedule.factor(step)

    def _schedulers_step(self) -> None:
        self._set_lr(self.global_step + 1)

    def _set_aside(self, parameter: torch.nn.Parameter) -> None:
        assert parameter.grad is not None
        self._pre_grads[parameter], parameter.grad = parameter.grad, None

    def _optimizers_step(self) -> None:
        for parameter, gradient in self._pre_grads.items():
            parameter.grad = gradient
        if self._pre_grads:
            torch.nn.utils.clip_grad_norm_(list(self._pre_grads), _CLIP_NORM)
        self._pre_grads.clear()
        super()._optimizers_step()

    def train_epoch(self, epoch: int, *, step_callback: Any = None) -> None:
        """One epoch; leaves with `TrainingOver` when the schedule or the box ends inside it."""
        self._epoch, self._epoch_start = epoch, epoch * len(self.train_loader)
        super().train_epoch(epoch, step_callback=self._after_step)

    def _after_step(self) -> None:
        if self.on_step is not None:
            self.on_step(self.global_step)
        finished = self.schedule.done(self.global_step)
        if finished or self.schedule.box_over():
            self.save_state()
            raise TrainingOver(finished)
        if self.global_step % self.settings.checkpoint_steps == 0:
            self.save_state()

    def maybe_save_checkpoint(self, epoch: int | str, local_step: int = 0) -> None:
        """Called by the library at an epoch's end and when interrupted."""
        del local_step
        if epoch == "interrupted":
            self.save_state()

    def save_state(self) -> None:
        """Write weights, moments and position, then rename over the old state."""
        model = {k: v for k, v in self.model.state_dict().items() if not k.startswith(_FROZEN)}
        state = {
            "schema": STATE_SCHEMA,
            "identity": self.identity,
            "model": model,
            "optimizer": self.optimizers[0].state_dict(),
            "epoch": self._epoch,
            "local_step": self.global_step - self._epoch_start,
            "global_step": self.global_step,
            "spent_seconds": self.schedule.spent,
        }
        with replacing(self.state_file) as temporary:
            torch.save(state, temporary)
        if self.on_save is not None:
            self.on_save()

    def _read_state(self) -> dict[str, Any]:
        if not self.state_file.is_file():
            return {}
        try:
            state: dict[str, Any] = torch.load(
                self.state_file, map_location=self.device, weights_only=True
            )
        except (RuntimeError, EOFError, pickle.UnpicklingError):
            raise ValueError(
                f"resume: {self.state_file} is not a training state; remove it to start over"
            ) from None
        if state["schema"] != STATE_SCHEMA:
            raise ValueError(
                f"resume: {self.state_file} has schema {state['schema']}, this version reads "
                f"{STATE_SCHEMA}; remove the file to start over"
            )
        for key, value in self.identity.items():
            if state["identity"].get(key) != value:
                raise ValueError(
                    f"resume: {self.state_file} was trained with {key} = "
                    f"{state['identity'].get(key)!r}, the recipe has {value!r}; change it back or "
                    "remove the file to start over"
                )
        return state


@contextmanager
def library_fits(device: torch.device) -> Iterator[None]:
    """Swap what the library's module holds for a run: its progress bar, and on a CPU its timer.

    The bar redraws a terminal; runs here report lines with the time left. The timer synchronises
    an accelerator, and raises without one.
    """
    bar, timer = library.tqdm, library._StepTimer
    library.tqdm = lambda iterable, **_: iterable  # type: ignore[assignment]
    if device.type == "cpu":
        library._StepTimer = _CpuStepTimer  # type: ignore[misc]
    try:
        yield
    finally:
        library.tqdm, library._StepTimer = bar, timer  # type: ignore[misc]


class _CpuStepTimer(library._StepTimer):
    def mark(self, name: str) -> None:
        if self.enabled:
            self._marks[name] = library.time.perf_counter()

    def now(self) -> float | None:
        return library.time.perf_counter() if self.enabled else None

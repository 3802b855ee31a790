"""The LR and what goes with it: changed around the optimizer step and restored; schedulers advanced.

Schedulers never see the scale: they read and write the base LR, before and after.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.lr import Adjustment, ScheduleProgress


@contextlib.contextmanager
def adjusted(optimizer: torch.optim.Optimizer, adjustment: Adjustment) -> Iterator[None]:
    """Change every group's LR, betas, eps and weight decay inside the block; the old values return exactly.

    What is held in a tensor is changed in place, so that captured or compiled optimizers see it. Groups keep
    the proportions of their LRs.
    """
    if adjustment.lr == adjustment.ratio == adjustment.weight_decay == 1.0:
        yield
        return
    saved = [{key: _copy(group[key]) for key in _KEYS if key in group} for group in optimizer.param_groups]
    changed = [_changed(base, adjustment) for base in saved]
    try:
        for group, values in zip(optimizer.param_groups, changed, strict=True):
            for key, value in values.items():
                _set(group, key, value)
        yield
    finally:
        for group, base in zip(optimizer.param_groups, saved, strict=True):
            for key, value in base.items():
                _set(group, key, value)


_KEYS = ("lr", "betas", "eps", "weight_decay")


def _changed(base: Mapping[str, Any], adjustment: Adjustment) -> dict[str, Any]:
    rule, ratio = adjustment.rule, adjustment.ratio
    changed = {"lr": base["lr"] * adjustment.lr}
    if "betas" in base:
        changed["betas"] = _sound_betas(rule.betas(ratio, base["betas"]), base["betas"], ratio)
        if "eps" in base:
            changed["eps"] = rule.eps(ratio, base["eps"])
    if "weight_decay" in base:
        changed["weight_decay"] = base["weight_decay"] * adjustment.weight_decay
    return changed


def _sound_betas(betas: Any, base: Any, ratio: float) -> Any:
    """Betas as they come out of a rule, unless a scheduler has moved their base out of its range.

    Raises:
        ConfigError: one is not in [0, 1).
    """
    if betas is not base and not all(0 <= float(beta) < 1 for beta in betas):
        shown, was = ([round(float(beta), 6) for beta in each] for each in (betas, base))
        raise ConfigError(
            f"at {ratio:g} times the reference batch the LR rule makes betas {shown} of {was}; allowed: at "
            "least 0 and below 1: a smaller batch.max, another lr.rule, a scheduler that leaves betas alone"
        )
    return betas


def _copy(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_copy(each) for each in value)
    return value.clone() if isinstance(value, torch.Tensor) else value


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    old = group[key]
    if isinstance(old, torch.Tensor):
        old.copy_(torch.as_tensor(value))
    elif isinstance(old, tuple) and any(isinstance(each, torch.Tensor) for each in old):
        for each, new in zip(old, value, strict=True):
            each.copy_(torch.as_tensor(new))
    else:
        group[key] = value


def base_lr(optimizer: torch.optim.Optimizer) -> float:
    """The first group's LR without any batch scale."""
    return float(optimizer.param_groups[0]["lr"])


# These take functions or other schedulers: a task's build_scheduler can make them.
_NEED_CODE = ("LRScheduler", "LambdaLR", "MultiplicativeLR", "ChainedScheduler", "SequentialLR")


def scheduler_class(name: str) -> type[lr_scheduler.LRScheduler]:
    """A scheduler of ``torch.optim.lr_scheduler`` by its class name.

    Raises:
        ConfigError: no such scheduler; names those there are.
    """
    found = {
        key: value
        for key, value in vars(lr_scheduler).items()
        if inspect.isclass(value)
        and issubclass(value, lr_scheduler.LRScheduler)
        and not key.startswith("_")
        and key not in _NEED_CODE
    }
    if name not in found:
        raise ConfigError(f"scheduler.name is {name!r}; allowed: none, {', '.join(sorted(found))}")
    return found[name]


class Schedule:
    """A torch scheduler driven by rows instead of by steps, or by epochs.

    Args:
        scheduler: The user's scheduler, or ``None``.
        progress: How many scheduler steps are due after how many rows.
        per_epoch: Step once per epoch instead. ``ReduceLROnPlateau`` always is.
        planned_steps: Steps after which it has reached its end and is stepped no more, so that a run
            extended later stays at the final LR; ``None`` where it has no planned end.
    """

    def __init__(
        self,
        scheduler: lr_scheduler.LRScheduler | None,
        progress: ScheduleProgress,
        *,
        per_epoch: bool = False,
        planned_steps: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.planned_steps = planned_steps
        self._progress = progress
        self._needs_loss = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        self._per_epoch = per_epoch or self._needs_loss
        self._count = self._skipped = self._offset = 0
        self._last_seen: int | None = None

    def after_step(self, epoch: int, rows_in_epoch: int, *, applied: bool, gain: float = 0.0) -> None:
        """Catch up with the rows used so far; steps of any size advance it to the same place.

        Args:
            epoch: Pass being trained, from 0.
            rows_in_epoch: Rows of it used so far.
            applied: Whether the optimizer stepped. What a skipped step was due is not made up for.
            gain: AdaScale's gains of all steps so far, summed up.
        """
        if self.scheduler is None or self._per_epoch:
            return
        due = self._progress.count(epoch, rows_in_epoch, gain) + self._offset - self._skipped
        if not applied:
            self._skipped += due - self._count
            return
        while self._count < due:
            self._step()

    def leave(self, epoch: int, rows_in_epoch: int, gain: float = 0.0) -> None:
        """A pass was left early: the next one goes on from the count reached."""
        if not self._per_epoch:
            count = self._progress.count
            self._offset -= count(epoch + 1, 0, gain) - count(epoch, rows_in_epoch, gain)

    def plan_by(self, progress: ScheduleProgress) -> None:
        """Count by other rows or another reference batch from now on; before :meth:`load_state_dict`."""
        self._progress = progress

    def after_epoch(self, loss: float | None) -> None:
        """One step of a per-epoch scheduler; ``loss`` is what ``ReduceLROnPlateau`` watches."""
        if self.scheduler is None or not self._per_epoch:
            return
        if not self._needs_loss:
            self._step()
        elif loss is not None:
            self.scheduler.step(loss)  # type: ignore[arg-type]  # torch types it as an epoch number

    def _step(self) -> None:
        """One step of the scheduler, unless it has reached its end.

        Raises:
            RuntimeError: somebody else steps it too.
        """
        scheduler = self.scheduler
        if scheduler is not None and (self.planned_steps is None or self._count < self.planned_steps):
            count = getattr(scheduler, "last_epoch", None)  # a ChainedScheduler has none
            if self._last_seen is not None and count != self._last_seen:
                raise RuntimeError(
                    f"{type(scheduler).__name__} was stepped from elsewhere (its count is "
                    f"{count}, expected {self._last_seen}); allowed: either scheduler.step() "
                    "in the loop, once per epoch, or the scheduler given to prepare()"
                )
            scheduler.step()
            self._last_seen = getattr(scheduler, "last_epoch", None)
        self._count += 1

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state, the count of steps given to it, and its planned end."""
        inner = self.scheduler.state_dict() if self.scheduler is not None else None
        return {
            "count": self._count,
            "skipped": self._skipped,
            "planned_steps": self.planned_steps,
            "scheduler": inner,
        }

    def load_state_dict(
        self, state: Mapping[str, Any], epoch: int, rows_in_epoch: int = 0, gain: float = 0.0
    ) -> None:
        """Go on at a place of a pass, from the count reached and towards the end planned then.

        Where rows or reference batch have changed since, the count goes on from where it was.
        """
        self._count, self._skipped = state["count"], state["skipped"]
        self.planned_steps = state["planned_steps"]
        if not self._per_epoch:
            due = self._progress.count(epoch, rows_in_epoch, gain)
            self._offset = self._count + self._skipped - due
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])

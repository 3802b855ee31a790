"""What of a configuration has to fit something else of it, or an optimizer that exists already."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.estimators import PieceSums
from ray_dynbs.core.guards import Clamp, ClassCoverage, DataCeiling, GrowthLimit, Quantise
from ray_dynbs.core.guards.class_coverage import AUTO
from ray_dynbs.core.lr import LR_RULES
from ray_dynbs.core.manager import DynamicBatchSizeManager
from ray_dynbs.core.policy import Policy
from ray_dynbs.core.signal import Signal


def check_guards(guards: Sequence[Policy], smallest: int, initial: int, largest: int) -> None:
    """See that every guard leaves a size within the bounds of the batch.

    Args:
        guards: As the configuration has them.
        smallest: ``batch.min``, rows.
        initial: ``batch.initial``, rows.
        largest: ``batch.max``, rows.

    Raises:
        ConfigError: one leaves none; names it.
    """
    bounds = f"batch.min is {smallest} and batch.max is {largest}"
    for index, guard in enumerate(guards):
        if isinstance(guard, ClassCoverage) and guard.class_counts != AUTO and guard.floor > initial:
            key, size = ("max", largest) if guard.floor > largest else ("initial", initial)
            raise ConfigError(
                f"guards.{index}: class_coverage needs {guard.floor} rows, batch.{key} is {size};"
                f" allowed: a larger batch.{key}, or a smaller quantile"
            )
        if isinstance(guard, Clamp) and not (guard.min <= largest and guard.max >= smallest):
            raise ConfigError(
                f"guards.{index}: clamp allows {guard.min} to {guard.max}, {bounds}; allowed: ranges that "
                "overlap"
            )
        if isinstance(guard, Quantise) and guard.within(smallest, smallest, largest) is None:
            raise ConfigError(
                f"guards.{index}: quantise allows no size in between, {bounds}; allowed: one or more"
            )


def order_of_guards(guards: Sequence[Policy]) -> str:
    """What there is to say where a guard may undo the sizes that ``quantise`` allows; empty for nothing."""
    kinds = [type(guard) for guard in guards]
    if Quantise not in kinds:
        return ""
    later = [kind.__name__ for kind in kinds[kinds.index(Quantise) + 1 :] if kind in _MAKE_SIZES]
    return f"guards: {later[0]} after quantise may make sizes that quantise does not allow" if later else ""


_MAKE_SIZES = (Clamp, ClassCoverage, DataCeiling, GrowthLimit)


def try_decision(manager: DynamicBatchSizeManager) -> None:
    """Let a manager decide once on plausible numbers, to hear what a policy of the user's own says.

    Raises:
        ConfigError: it raised, or its state is nothing that JSON can hold.
    """
    signal = Signal.measured(
        epoch=0,
        epochs_seen=1.0,
        step=10,
        samples_seen=1_000,
        num_steps=10,
        num_finite_steps=10,
        grad_norm=1.0,
        train_loss=1.0,
        val_loss=1.0,
        val_metric=0.5,
        memory_fraction=0.5,
        step_time_s=0.1,
        pieces=PieceSums.of_step(1.0, 50.0) + PieceSums.of_step(1.1, 40.0),
    )
    try:
        manager.start(world_size=1, num_rows=None)
        manager.decide(signal)
        json.dumps(manager.state_dict()["policy_state"])
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(f"policy or guards: a first decision failed: {reason}") from error


def check_betas(rule: str, betas: Sequence[float], reference: int, largest: int) -> None:
    """See that an LR rule is defined for every batch there may be.

    Args:
        rule: Its name.
        betas: The optimizer's.
        reference: The batch the base LR was tuned for, rows.
        largest: ``batch.max``, rows.

    Raises:
        ConfigError: it is not; says up to which size it is.
    """
    first, second = betas
    ratio = round(LR_RULES[rule]().largest_ratio((first, second)), 9)  # 1 / (1 - 0.9) is a little above 10
    if largest / reference >= ratio:
        most = math.ceil(round(ratio * reference, 6)) - 1
        raise ConfigError(
            f"lr.rule {rule} holds below {ratio:g} times the reference batch of {reference} "
            f"(betas {first:g}, {second:g}), batch.max is {largest}; allowed: at most {most}"
        )


def check_optimizer(
    optimizer: Any, *, rule: str, reference: int, largest: int, preconditioned: bool = False
) -> None:
    """See that an LR rule and the measuring of noise can do with an optimizer what they have to.

    Args:
        optimizer: torch's.
        rule: Name of the LR rule.
        reference: The batch the base LR was tuned for, rows.
        largest: ``batch.max``, rows.
        preconditioned: Whether noise is measured in Adam's metric.

    Raises:
        ConfigError: a beta would leave its range within the bounds of the batch; betas have to follow and
            there are none, or they are held as plain numbers that a captured graph would keep.
    """
    changes_betas, kind = LR_RULES[rule]().changes_betas, type(optimizer).__name__
    for group in optimizer.param_groups:
        betas = group.get("betas")
        if betas is None and preconditioned:
            raise ConfigError(
                f"noise.preconditioned is true, and {kind} keeps no second moments; allowed: adam or adamw"
            )
        if not changes_betas:
            continue
        who = f"lr.rule {rule} changes betas, and {kind}"
        if betas is None or len(betas) != 2:
            raise ConfigError(f"{who} has {betas or 'none'} in its parameter groups; allowed: adam or adamw")
        check_betas(rule, [float(beta) for beta in betas], reference, largest)
        if group.get("capturable") and any(isinstance(each, float) for each in betas):
            raise ConfigError(
                f"{who} is capturable with betas {betas}, which a captured graph keeps; allowed: tensors as "
                "betas, capturable: false, or a rule that only changes the LR"
            )

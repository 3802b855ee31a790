"""A whole configuration, and the part of it that a loop of the user's own adopts."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from ray_dynbs.config.components import build_guards, build_policy, with_defaults
from ray_dynbs.config.sections import (
    BatchSection,
    CheckpointSection,
    ClusterSection,
    DataSection,
    EvaluateSection,
    LRSection,
    MemorySection,
    MetricSection,
    NoiseSection,
    OptimizerSection,
    SchedulerSection,
    Section,
    Shuffle,
    Timeout,
    default_guards,
)
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.estimators import NoiseScale
from ray_dynbs.core.guards import GUARDS, ClassCoverage
from ray_dynbs.core.guards.reset import ResetToBase
from ray_dynbs.core.lr import ADAM_FAMILY, LR_RULES, Scaling
from ray_dynbs.core.manager import DynamicBatchSizeManager
from ray_dynbs.core.policies import POLICIES

DEFAULT_POLICY = "threshold"
NEED_NOISE = ("goodput", "noise_scale", "norm_test")
"""Policies that cannot do without measured gradient noise."""


class Batching(Section):
    """How the batch size is decided and the step taken: what both ways in have in common."""

    seed: int = Field(0, ge=0, description="seed of weights, row order and random numbers")
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = Field(
        "fp32", description="arithmetic of the forward; auto: bf16 where the device computes in it, else fp32"
    )
    clip_grad_norm: float | None = Field(None, gt=0, description="largest gradient norm, measured before")
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="a step whose loss or gradient is not finite ends the run, or is left out"
    )
    metric: MetricSection = Field(default_factory=MetricSection)
    batch: BatchSection = Field(default_factory=BatchSection)
    policy: dict[str, Any] = Field(
        default_factory=lambda: {"name": DEFAULT_POLICY},
        description="a policy's name, or import path, and its keys",
    )
    guards: list[dict[str, Any]] = Field(default_factory=default_guards, description="guards, in order")
    lr: LRSection = Field(default_factory=LRSection)
    noise: NoiseSection = Field(default_factory=NoiseSection)
    memory: MemorySection = Field(default_factory=MemorySection)

    @field_validator("policy")
    @classmethod
    def _complete_policy(cls, policy: dict[str, Any]) -> dict[str, Any]:
        return with_defaults(POLICIES, {"name": DEFAULT_POLICY, **policy})

    @field_validator("guards")
    @classmethod
    def _complete_guards(cls, guards: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [with_defaults(GUARDS, guard) for guard in guards]

    @model_validator(mode="after")
    def _buildable(self) -> Batching:
        self.make_manager()
        for index, guard in enumerate(build_guards(self.guards)):
            if isinstance(guard, ClassCoverage) and guard.floor > self.batch.max:
                raise ConfigError(
                    f"guards.{index}: class_coverage needs {guard.floor} rows, batch.max is {self.batch.max};"
                    " allowed: a larger batch.max, or a smaller quantile"
                )
        if self.policy["name"] in NEED_NOISE and self.noise.measure_every is None:
            raise ConfigError(
                f"policy.name is {self.policy['name']!r}, which needs gradient noise, and noise.measure_every"
                " is null; allowed: auto or a number of steps"
            )
        return self

    @property
    def scaling(self) -> Scaling:
        """How the LR follows the batch."""
        return Scaling(
            rule=LR_RULES[self.lr.rule](),
            reference_batch_size=self.reference_batch_size,
            warmup_epochs=self.lr.warmup_epochs,
            ramp_steps=self.lr.ramp_steps,
            scale_weight_decay=self.lr.scale_weight_decay,
        )

    def _reset(self) -> list[ResetToBase]:
        return [ResetToBase(size=self.batch.initial)] if self.batch.reset == "to_base" else []

    def check_rule(self, betas: tuple[float, float]) -> None:
        """See that the LR rule is defined for every batch there may be.

        Args:
            betas: The optimizer's.

        Raises:
            ConfigError: it is not; says up to which size it is.
        """
        reference = self.reference_batch_size
        largest = round(
            LR_RULES[self.lr.rule]().largest_ratio(betas), 9
        )  # 1 / (1 - 0.9) is a little above 10
        if self.batch.max / reference >= largest:
            most = math.ceil(round(largest * reference, 6)) - 1
            raise ConfigError(
                f"lr.rule {self.lr.rule} holds below {largest:g} times the reference batch of {reference} "
                f"(betas {betas[0]:g}, {betas[1]:g}), batch.max is {self.batch.max}; allowed: at most {most}"
            )

    @property
    def splits_to_measure(self) -> bool:
        """Whether a lone micro-batch is cut in two on measured steps."""
        split = self.noise.split
        return self.policy["name"] in NEED_NOISE if split == "auto" else split

    @property
    def reference_batch_size(self) -> int:
        """The batch the base LR was tuned for."""
        return self.lr.reference_batch_size or self.batch.initial

    def make_manager(self, world_size: int = 1) -> DynamicBatchSizeManager:
        """The manager this configuration describes, before its first decision.

        Raises:
            ConfigError: a policy or guard that does not exist or refuses its keys.
        """
        return DynamicBatchSizeManager(
            self.batch.initial,
            self.batch.max,
            self.batch.min,
            policy=build_policy(self.policy, memory_vote=self.memory.vote),
            guards=[*build_guards(self.guards), *self._reset()],
            lr_rule=LR_RULES[self.lr.rule](),
            reference_batch_size=self.lr.reference_batch_size,
            max_lr_scale=self.lr.max_scale,
            max_micro_batch_size=self.memory.max_micro_batch_size,
            world_size=world_size,
            noise=NoiseScale(decay=self.noise.decay),
        )


class LoopSettings(Batching):
    """What an existing train loop adopts: the ``dynbs`` argument of our trainer."""

    shuffle: Shuffle = Field("window", description="order of the rows in a pass")
    columns: list[str] | None = Field(None, description="columns of the training data to read; all")
    wait: bool = Field(False, description="the cluster may grow: do not refuse what it has no room for now")
    timeout_s: Timeout = Field(300.0, description="longest wait for the first rows")


class Config(Batching):
    """A whole run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][\w.-]*$", description="name of the run and its directory")
    task: str = Field(description="import path of the task: pkg.module, or pkg.module:object")
    task_args: dict[str, Any] = Field(default_factory=dict, description="what the task makes of it")
    epochs: int = Field(ge=1, description="passes over the training rows")
    optimizer: OptimizerSection
    scheduler: SchedulerSection = Field(default_factory=SchedulerSection)
    data: DataSection = Field(default_factory=DataSection)
    cluster: ClusterSection = Field(default_factory=ClusterSection)
    evaluate: EvaluateSection = Field(default_factory=EvaluateSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)

    @model_validator(mode="after")
    def _rule_fits(self) -> Config:
        betas = (self.optimizer.model_extra or {}).get("betas", [0.9, 0.999])
        if self.optimizer.name in ADAM_FAMILY and isinstance(betas, list) and len(betas) == 2:
            self.check_rule((float(betas[0]), float(betas[1])))
        return self

    out: str = Field("runs", min_length=1, description="folder or URI for run directories")

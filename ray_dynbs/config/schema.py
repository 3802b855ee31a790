"""A whole configuration, and the part of it that a loop of the user's own adopts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from ray_dynbs.config.components import build_guards, build_policy, with_defaults
from ray_dynbs.config.fits import check_betas, check_guards, check_optimizer, try_decision
from ray_dynbs.config.sections import (
    RULES_OF_NOISE,
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
from ray_dynbs.core.estimators.pieces import Lone
from ray_dynbs.core.guards import GUARDS
from ray_dynbs.core.guards.reset import ResetToBase
from ray_dynbs.core.lr import ADAM_FAMILY, LR_RULES, GainProgress, Scaling, ScheduleProgress
from ray_dynbs.core.manager import DynamicBatchSizeManager
from ray_dynbs.core.plan import tightest
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
        manager = self.make_manager()
        batch = self.batch
        check_guards(build_guards(self.guards), batch.min, batch.initial, batch.max)
        own = [self.policy["name"] not in POLICIES, *(g["name"] not in GUARDS for g in self.guards)]
        if any(own):
            try_decision(manager)
        if self._needs_noise and self.noise.measure_every is None:
            raise ConfigError(
                f"{self._needs_noise}, which needs gradient noise, and noise.measure_every is null; allowed: "
                "auto or a number of steps"
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
        if self.batch.reset == "warm_start":
            return []
        return [ResetToBase(size=self.batch.initial, grows=self.memory.vote != "shrink")]

    def check_optimizers(self, optimizers: Sequence[Any], reference: int | None = None) -> None:
        """See that the LR rule and the measuring of noise fit these optimizers.

        Args:
            optimizers: torch's.
            reference: The batch their LR was tuned for, rows; this configuration's if left out.

        Raises:
            ConfigError: they do not; see :func:`~ray_dynbs.config.fits.check_optimizer`.
        """
        for optimizer in optimizers:
            check_optimizer(
                optimizer,
                rule=self.lr.rule,
                reference=reference or self.reference_batch_size,
                largest=self.batch.max,
                preconditioned=self.noise.preconditioned,
            )

    def schedule_progress(self, num_rows: int, reference: int | None = None) -> ScheduleProgress:
        """What advances a per-step scheduler.

        Args:
            num_rows: Rows in one pass.
            reference: The batch the schedule is planned with; this configuration's if left out.
        """
        kind = GainProgress if self.lr.progress == "gain" else ScheduleProgress
        return kind(num_rows, reference or self.reference_batch_size)

    @property
    def lone(self) -> Lone:
        """What is done on one worker with a lone micro-batch, to measure noise."""
        if self.noise.lone != "auto":
            return self.noise.lone
        return "split" if self._needs_noise else "none"

    @property
    def _needs_noise(self) -> str:
        """The key whose value cannot do without measured noise; empty for none."""
        if self.policy["name"] in NEED_NOISE:
            return f"policy.name is {self.policy['name']!r}"
        return f"lr.rule is {self.lr.rule!r}" if self.lr.rule in RULES_OF_NOISE else ""

    def probed_sizes(
        self, *, num_rows: int, world_size: int, fewest: int | None = None, known: int | None = None
    ) -> tuple[int, int]:
        """The first and the largest micro-batch that a probe of memory has to try, rows.

        Args:
            num_rows: Rows in a pass.
            world_size: Data-parallel ranks.
            fewest: Ranks that the run may have to do with later; ``world_size`` if left out.
            known: Most rows that were found to fit before.
        """
        share = -(-self.batch.max // (fewest or world_size))
        most = tightest(share, num_rows, self.memory.max_micro_batch_size, known) or 1
        return min(-(-self.batch.initial // world_size), most), most

    @property
    def headroom(self) -> tuple[float, str]:
        """Fraction of the memory that a probe leaves free, and why where it is more than asked for.

        ``threshold`` would halve at its first decision what fills more than its own limit.
        """
        asked, high = self.memory.headroom, self.policy.get("memory_high")
        left = round(1 - high, 9) if self.policy["name"] == "threshold" and high is not None else 0.0
        if left <= asked:
            return asked, ""
        return (
            left,
            f"{left:.0%} is left free, since policy.memory_high is {high:g} (memory.headroom {asked:g})",
        )

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
            guards=[*self._reset(), *build_guards(self.guards)],
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
    def _noise_can_be_measured(self) -> Config:
        alone = self.cluster.worker_range[1] == 1 and self.memory.max_micro_batch_size is None
        if self._needs_noise and alone and self.noise.lone == "none":
            raise ConfigError(
                f"{self._needs_noise}, which needs gradient noise, and one worker with one micro-batch in a "
                "step has nothing to compare under noise.lone none; allowed: auto, split, successive, more "
                "workers, or a memory.max_micro_batch_size"
            )
        return self

    @model_validator(mode="after")
    def _rule_fits(self) -> Config:
        self.check_rule()
        return self

    def check_rule(self) -> None:
        """See that the LR rule holds for every batch there may be, as far as the configuration tells.

        Raises:
            ConfigError: it does not; says up to which size it does.
        """
        betas = (self.optimizer.model_extra or {}).get("betas", [0.9, 0.999])
        numbers = [each for each in betas if type(each) in (int, float)] if isinstance(betas, list) else []
        if self.optimizer.name in ADAM_FAMILY and len(numbers) == len(betas) == 2:  # else torch complains
            check_betas(self.lr.rule, numbers, self.reference_batch_size, self.batch.max)

    out: str = Field("runs", min_length=1, description="folder or URI for run directories")

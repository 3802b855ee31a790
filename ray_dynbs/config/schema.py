"""The configuration's keys, their types, meanings and defaults.

Unknown keys are errors everywhere except under ``task_args``, ``optimizer`` and ``scheduler``, whose
further keys belong to the task, the optimizer and the scheduler and are checked against those.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ray_dynbs.config.components import build_guards, build_policy, with_defaults
from ray_dynbs.config.errors import nearest
from ray_dynbs.core.cadence import Cadence
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.estimators import NoiseScale
from ray_dynbs.core.guards import GUARDS, ClassCoverage
from ray_dynbs.core.lr import ADAM_FAMILY, LR_RULES, Scaling
from ray_dynbs.core.manager import DynamicBatchSizeManager
from ray_dynbs.core.policies import POLICIES

RuleName = Literal["none", "linear", "sqrt", "adascale", "adascale_sqrt", "adam_sde", "legw", "half_life"]
Shuffle = Literal["window", "full", "none"]
DEFAULT_POLICY = "threshold"
NEED_NOISE = ("goodput", "noise_scale", "norm_test")
Rows = Annotated[int, Field(ge=1)]
Timeout = Annotated[float, Field(gt=0)]
Workers = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """Base of all sections: strict types, no unknown keys, immutable."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, validate_default=True
    )


class MetricSection(Section):
    """What "best" means."""

    name: str = Field("loss", description="a metric of the task, or loss (over the validation rows)")
    mode: Literal["max", "min"] = Field("min", description="whether more or less is better")


class OptimizerSection(Section):
    """The optimizer; further keys are its arguments in torch."""

    model_config = ConfigDict(extra="allow")
    name: Literal["sgd", "adam", "adamw"] = Field(description="torch optimizer")
    lr: float = Field(gt=0, description="base LR, tuned at lr.reference_batch_size")

    @model_validator(mode="after")
    def _sound(self) -> OptimizerSection:
        _check_arguments(self.model_extra or {})
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """Everything for the torch class."""
        return {"lr": self.lr, **(self.model_extra or {})}


def _check_arguments(arguments: dict[str, Any]) -> None:
    """Refuse numbers no class can mean, and ``auto`` where it would not be replaced."""
    for key, value in arguments.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, float) and not math.isfinite(item):
                raise ConfigError(f"{key} is {item}; allowed: finite numbers")
            if isinstance(item, str) and item.lower() == "auto" and value != "auto":
                raise ConfigError(f"{key} is {value!r}; allowed: auto, by itself")


class SchedulerSection(Section):
    """A torch LR scheduler; further keys are its arguments, ``auto`` for the number of its steps."""

    model_config = ConfigDict(extra="allow")
    name: str = Field("none", description="class in torch.optim.lr_scheduler, or none")
    unit: Literal["step", "epoch"] = Field("step", description="what the scheduler counts")

    @model_validator(mode="after")
    def _sound(self) -> SchedulerSection:
        extra = self.model_extra or {}
        if self.name == "none" and extra:
            key = next(iter(extra))
            hint = nearest(key, ("name", "unit"))
            raise ConfigError(f"unknown key {key!r}{hint}; allowed without a scheduler's name: name, unit")
        _check_arguments(extra)
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """Everything for the torch class."""
        return dict(self.model_extra or {})


class DataSection(Section):
    """Where rows come from, unless the task brings them."""

    feed: Literal["auto", "indexed"] = Field("auto", description="how rows reach the workers")
    shuffle: Shuffle = Field("window", description="order of the rows in a pass")
    train: str | list[str] | None = Field(None, description="Parquet file, folder or URI")
    validation: str | list[str] | None = Field(None, description="Parquet file, folder or URI")
    features: str | list[str] | None = Field(None, description="columns a model reads")
    label: str | None = Field(None, description="column a model predicts")
    timeout_s: Timeout = Field(300.0, description="longest wait for the first rows")

    @model_validator(mode="after")
    def _sound(self) -> DataSection:
        columns = self.columns or []
        repeated = [column for column in columns if columns.count(column) > 1]
        if repeated:
            raise ConfigError(f"column {repeated[0]!r} is given twice among features and label")
        return self

    @property
    def columns(self) -> list[str] | None:
        """Columns to read, or ``None`` for all."""
        if self.features is None:
            return None
        features = [self.features] if isinstance(self.features, str) else self.features
        return [*features, *([self.label] if self.label else [])]


class BatchSection(Section):
    """The global batch size: rows per optimizer step over all workers."""

    initial: Rows = Field(32, description="to begin with")
    min: Rows = Field(8, description="never smaller")
    max: Rows = Field(512, description="never larger")
    decide_every: Literal["epoch"] | dict[str, int] = Field(
        "epoch", description="when it may change: epoch, {steps: N} or {samples: N}, and at every epoch's end"
    )

    @model_validator(mode="after")
    def _ordered(self) -> BatchSection:
        if self.min > self.max:
            raise ConfigError(f"min is {self.min} and max is {self.max}; allowed: min at most max")
        if not self.min <= self.initial <= self.max:
            raise ConfigError(f"initial is {self.initial}; allowed: {self.min} to {self.max} (min to max)")
        every = self.decide_every
        if isinstance(every, dict) and (
            len(every) != 1 or not every.keys() <= {"steps", "samples"} or min(every.values()) < 1
        ):
            raise ConfigError(
                f"decide_every is {every}; allowed: epoch, {{steps: N}} or {{samples: N}} with N at least 1"
            )
        return self

    @property
    def cadence(self) -> Cadence:
        """When a decision is due."""
        every = self.decide_every
        return Cadence() if isinstance(every, str) else Cadence(**every)


class LRSection(Section):
    """How the LR follows the batch size."""

    rule: RuleName = Field("none", description="multiplier on the base LR as the batch changes")
    warmup_epochs: float = Field(0.0, ge=0, description="passes over which the multiplier is phased in")
    ramp_steps: int = Field(0, ge=0, description="optimizer steps over which a later change is phased in")
    scale_weight_decay: bool = Field(False, description="weight decay times the root of B / B_ref")
    reference_batch_size: Rows | None = Field(
        None, description="batch the base LR was tuned for; batch.initial"
    )
    max_scale: float | None = Field(None, gt=0, description="cap on the multiplier")


class NoiseSection(Section):
    """How gradient noise is measured and smoothed."""

    measure_every: Literal["auto"] | Rows | None = Field(
        "auto", description="steps from one measurement to the next; auto: at 2 % of step time; null: never"
    )
    split: Literal["auto"] | bool = Field(
        "auto",
        description="on one worker, cut a lone micro-batch in two to measure; auto: where a policy needs it",
    )
    decay: float | None = Field(
        None, ge=0, lt=1, description="weight kept from one measured step to the next; null adapts itself"
    )


class MemorySection(Section):
    """What memory may change."""

    vote: Literal["accumulate", "shrink"] = Field(
        "accumulate", description="high memory shrinks the micro-batch only, or may shrink the batch"
    )
    max_micro_batch_size: Rows | None = Field(None, description="most rows in one forward on one worker")


class ClusterSection(Section):
    """Workers and where they run."""

    address: str | None = Field(None, description="a running cluster; RAY_ADDRESS, else a new local one")
    num_workers: Workers | list[Workers] = Field(
        1, description="data-parallel workers, or [min, max]: as many as there is room for"
    )
    wait: bool = Field(False, description="wait for a cluster that has too little to grow, else refuse")
    use_gpu: Literal["auto"] | bool = Field("auto", description="one GPU per worker where there are enough")
    resources_per_worker: dict[str, Annotated[float, Field(gt=0)]] | None = Field(
        None, description="Ray resources; 1 CPU, less if few"
    )
    max_failures: Literal["auto"] | Annotated[int, Field(ge=-1)] = Field(
        "auto",
        description="restarts of the workers before giving up, -1: no limit; auto: 3 for lost workers, 0 for "
        "errors of the code",
    )

    @model_validator(mode="after")
    def _ordered(self) -> ClusterSection:
        workers = self.num_workers
        if isinstance(workers, list) and (len(workers) != 2 or workers[0] > workers[1]):
            raise ConfigError(f"num_workers is {workers}; allowed: a number, or [min, max] with min <= max")
        return self

    @property
    def worker_range(self) -> tuple[int, int]:
        """Fewest and most workers."""
        workers = self.num_workers
        return (workers[0], workers[1]) if isinstance(workers, list) else (workers, workers)

    @property
    def workers_text(self) -> str:
        """``2``, or ``1 to 4``."""
        fewest, most = self.worker_range
        return f"{fewest}" if fewest == most else f"{fewest} to {most}"


class EvaluateSection(Section):
    """Validation."""

    every: Literal["epoch"] = Field("epoch", description="when")
    batch_size: Rows | None = Field(None, description="rows per worker and forward; twice the micro-batch")


class CheckpointSection(Section):
    """What is saved."""

    every: Literal["epoch"] = Field("epoch", description="when")
    num_to_keep: Annotated[int, Field(ge=1)] = Field(2, description="newest checkpoints to keep")


def default_guards() -> list[dict[str, Any]]:
    """Keep the batch for two epochs, and for one decision after each change."""
    return [{"name": "warmup_hold", "epochs": 2}, {"name": "cooldown", "decisions": 1}]


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
            guards=build_guards(self.guards),
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

"""The sections of a configuration: their keys, types, meanings and defaults.

Unknown keys are errors everywhere except under ``optimizer`` and ``scheduler``, whose further keys belong to
the optimizer and the scheduler and are checked against those.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ray_dynbs.config.errors import nearest
from ray_dynbs.core.cadence import Cadence
from ray_dynbs.core.errors import ConfigError

RuleName = Literal["none", "linear", "sqrt", "adascale", "adascale_sqrt", "adam_sde", "legw", "half_life"]
RULES_OF_NOISE = ("adascale", "adascale_sqrt")
"""LR rules that go by measured gradient noise."""
Shuffle = Literal["window", "full", "none"]
Rows = Annotated[int, Field(ge=1, le=10**15)]
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


EveryKey = Literal["epoch"] | dict[str, int]
"""``epoch``, ``{steps: N}`` or ``{samples: N}``."""


def _cadence(key: str, every: str | dict[str, int]) -> Cadence:
    """When something is due within a pass.

    Raises:
        ConfigError: neither steps nor samples, or both, or below 1.
    """
    if isinstance(every, str):
        return Cadence()
    if len(every) != 1 or not every.keys() <= {"steps", "samples"} or min(every.values()) < 1:
        raise ConfigError(
            f"{key} is {every}; allowed: epoch, {{steps: N}} or {{samples: N}} with N at least 1"
        )
    return Cadence(**every)


class BatchSection(Section):
    """The global batch size: rows per optimizer step over all workers."""

    initial: Rows = Field(32, description="to begin with")
    min: Rows = Field(8, description="never smaller")
    max: Rows = Field(512, description="never larger")
    decide_every: EveryKey = Field(
        "epoch", description="when it may change: epoch, {steps: N} or {samples: N}, and at every epoch's end"
    )
    reset: Literal["warm_start", "to_base"] = Field(
        "warm_start", description="an epoch begins with the size reached, or with initial again"
    )

    @model_validator(mode="after")
    def _ordered(self) -> BatchSection:
        if self.min > self.max:
            raise ConfigError(f"min is {self.min} and max is {self.max}; allowed: min at most max")
        if not self.min <= self.initial <= self.max:
            raise ConfigError(f"initial is {self.initial}; allowed: {self.min} to {self.max} (min to max)")
        every = self.decide_every
        _cadence("decide_every", every)
        if self.reset == "to_base" and every == "epoch":
            raise ConfigError(
                "reset is 'to_base' and decide_every is 'epoch': the size would never change; allowed: "
                "decide_every {steps: N} or {samples: N}, or reset: warm_start"
            )
        return self

    @property
    def cadence(self) -> Cadence:
        """When a decision is due."""
        return _cadence("decide_every", self.decide_every)


class LRSection(Section):
    """How the LR follows the batch size."""

    rule: RuleName = Field("none", description="multiplier on the base LR as the batch changes")
    progress: Literal["rows", "gain"] = Field(
        "rows",
        description="what advances a per-step scheduler: rows used, or AdaScale's gain (with an adascale "
        "rule), which takes longer",
    )
    warmup_epochs: float = Field(0.0, ge=0, description="passes over which the multiplier is phased in")
    ramp_steps: int = Field(0, ge=0, description="optimizer steps over which a later change is phased in")
    scale_weight_decay: bool = Field(
        False, description="weight decay times B / B_ref over the LR's multiplier"
    )
    reference_batch_size: Rows | None = Field(
        None, description="batch the base LR was tuned for; batch.initial"
    )
    max_scale: float | None = Field(None, gt=0, description="cap on the multiplier")

    @model_validator(mode="after")
    def _gain_is_measured(self) -> LRSection:
        if self.progress == "gain" and self.rule not in RULES_OF_NOISE:
            raise ConfigError(
                f"progress is 'gain' and rule is {self.rule!r}, which has none; allowed with "
                f"{' and '.join(RULES_OF_NOISE)}"
            )
        return self


class NoiseSection(Section):
    """How gradient noise is measured and smoothed."""

    measure_every: Literal["auto"] | Rows | None = Field(
        "auto", description="steps from one measurement to the next; auto: at 2 % of step time; null: never"
    )
    lone: Literal["auto", "split", "successive", "none"] = Field(
        "auto",
        description="one worker with one micro-batch in a step: cut it in two to measure (split), compare it "
        "with the step before, which is biased (successive), or do not measure; auto: split where a policy "
        "or LR rule needs it",
    )
    preconditioned: bool = Field(
        False, description="in Adam's metric, every gradient over sqrt(v) + eps; adam and adamw only"
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
    probe: Literal["auto", "off"] = Field(
        "auto",
        description="find the most rows that fit in one forward, by real steps at every start of a run",
    )
    headroom: float = Field(0.1, ge=0, lt=1, description="fraction of the memory that a probe leaves free")
    activation_checkpointing: Literal["off", "auto"] | Annotated[list[str], Field(min_length=1)] = Field(
        "off",
        description="layers that compute their activations again instead of keeping them: auto (those that "
        "repeat), or names of their classes",
    )

    @field_validator("probe", "activation_checkpointing", mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        """What YAML makes of the word ``off``."""
        return "off" if value is False else value


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

    every: EveryKey = Field("epoch", description="when: at every epoch's end, and {steps: N} or {samples: N}")
    batch_size: Rows | None = Field(
        None, description="rows per worker and forward; twice the micro-batch, if as many fit"
    )

    @model_validator(mode="after")
    def _sound(self) -> EvaluateSection:
        _cadence("every", self.every)
        return self

    @property
    def cadence(self) -> Cadence:
        """When it is due within a pass."""
        return _cadence("every", self.every)


class CheckpointSection(Section):
    """What is saved."""

    every: EveryKey = Field("epoch", description="when: at every epoch's end, and {steps: N} or {samples: N}")
    num_to_keep: Annotated[int, Field(ge=1)] = Field(2, description="newest checkpoints to keep")

    @model_validator(mode="after")
    def _sound(self) -> CheckpointSection:
        _cadence("every", self.every)
        return self

    @property
    def cadence(self) -> Cadence:
        """When one is due within a pass."""
        return _cadence("every", self.every)


def default_guards() -> list[dict[str, Any]]:
    """Keep the batch for two epochs, and for one decision after each change."""
    return [{"name": "warmup_hold", "epochs": 2}, {"name": "cooldown", "decisions": 1}]

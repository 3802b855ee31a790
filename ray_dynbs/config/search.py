"""A search as a YAML file: a base configuration, a space over its keys, and how to search it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from ray_dynbs.config.errors import explain, nearest
from ray_dynbs.config.load import apply_override, name_of_file, name_with, read_yaml, set_key
from ray_dynbs.config.schema import Config
from ray_dynbs.config.sections import MetricSection, Section
from ray_dynbs.config.space import Domain, Point, flattened, in_order
from ray_dynbs.core.errors import ConfigError

Cost = Literal["time_s", "samples", "steps"]


class AlgorithmSection(Section):
    """Which candidates are tried."""

    algorithm: Literal["random", "grid", "optuna", "pbt"] = Field(
        "random",
        description="random; every grid point; Optuna's TPE, which learns from the trials so far; or "
        "population-based training, which mutates running trials",
    )
    num_trials: Annotated[int, Field(ge=1, le=100_000)] = Field(
        16, description="candidates; with grids, for each of their combinations; with pbt, the population"
    )
    seed: int = Field(0, ge=0, description="seed of the draw")
    interval_epochs: Annotated[int, Field(ge=1)] = Field(2, description="pbt: epochs between mutations")


class StopSection(Section):
    """Which trials are stopped early."""

    name: Literal["asha", "median", "none"] = Field("asha", description="successive halving, median rule")
    grace_epochs: Annotated[int, Field(ge=1)] = Field(2, description="epochs that every trial gets")
    reduction_factor: Annotated[int, Field(ge=2)] = Field(
        3, description="asha: of so many trials one goes on at each rung"
    )


class TargetSection(Section):
    """What it costs to reach a value of the metric, instead of the best value."""

    value: float = Field(description="of the metric, mean over the seeds")
    cost: Cost = Field("time_s", description="training time, rows, or optimizer steps up to there, per seed")


class ResourcesSection(Section):
    """For every worker of a trial; their number is the base's ``cluster.num_workers``."""

    cpu: float = Field(1.0, gt=0, description="CPUs")
    gpu: float = Field(0.0, ge=0, description="GPUs; a fraction lets trials share one")


class Search(Section):
    """A whole search."""

    name: str = Field("search", pattern=r"^[A-Za-z0-9][\w.-]*$", description="name of the search's directory")
    base: str | dict[str, Any] = Field(description="a run's YAML file, seen from this one, or its keys")
    set_: dict[str, Any] = Field(default_factory=dict, alias="set", description="keys of the base to change")
    space: dict[str, Domain] = Field(min_length=1, description="keys of the base and their values")
    baselines: list[dict[str, Any]] = Field(
        default_factory=list, description="points tried in any case, such as fixed batches to compare with"
    )
    search: AlgorithmSection = Field(default_factory=AlgorithmSection)
    scheduler: StopSection = Field(default_factory=StopSection)
    metric: MetricSection | None = Field(None, description="the base's")
    target: TargetSection | None = Field(None, description="rank by the cost of reaching a value")
    seeds: Annotated[int, Field(ge=1, le=100)] = Field(1, description="seeds per trial, whose mean counts")
    resources: ResourcesSection = Field(default_factory=ResourcesSection)
    concurrency: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        "auto", description="trials at a time; as many as there is room for"
    )
    time_budget_s: float | None = Field(None, gt=0, description="no new epochs after this time")
    prefilter: Literal["none", "simulate"] = Field(
        "none", description="throw out candidates that do badly in the simulator before they are trained"
    )
    world: dict[str, float] = Field(
        default_factory=dict, description="the simulator's world, for prefilter: simulate"
    )
    out: str = Field("runs", min_length=1, description="folder or URI for the search's directory")

    @model_validator(mode="after")
    def _sound(self) -> Search:
        in_order(self.space)
        kinds = {domain.kind for domain in self.space.values()}
        algorithm = self.search.algorithm
        if "grid" in kinds and algorithm not in ("grid", "random"):
            raise ConfigError(f"search.algorithm is {algorithm!r}, and the space has grids; allowed: choice")
        if algorithm == "grid" and kinds != {"grid"}:
            raise ConfigError("search.algorithm is 'grid'; allowed: grids only, or algorithm: random")
        if algorithm == "pbt" and (any(d.when for d in self.space.values()) or self.scheduler.name != "none"):
            raise ConfigError("search.algorithm is 'pbt'; allowed: no `when`, and scheduler: {name: none}")
        if algorithm == "pbt" and self.baselines:
            raise ConfigError("search.algorithm is 'pbt', which would mutate baselines; allowed: none")
        for key in self.space:
            if key.partition(".")[0] in NOT_SEARCHED:
                raise ConfigError(
                    f"space: {key} cannot be searched: trials share data, workers, metric and epochs; "
                    f"allowed: any key but {', '.join(NOT_SEARCHED)}"
                )
        self._check_conditions()
        if self.prefilter == "simulate" and algorithm in ("grid", "pbt"):
            raise ConfigError(
                f"prefilter is 'simulate' and search.algorithm {algorithm!r}; allowed: random, optuna"
            )
        return self

    def _check_conditions(self) -> None:
        """A condition that can never hold would make a key disappear without a word.

        Raises:
            ConfigError: there is one.
        """
        for key, domain in self.space.items():
            for other, wanted in (domain.when or {}).items():
                values = wanted if isinstance(wanted, list) else [wanted]
                of = self.space.get(other)
                if of is None:
                    continue  # the base's, looked at with it
                if of.kind not in ("choice", "grid") or (domain.kind == "grid" and of.kind != "grid"):
                    raise ConfigError(
                        f"space: {key}: when names {other}, a {of.kind}; allowed: a "
                        f"{'grid' if domain.kind == 'grid' else 'choice or grid'}"
                    )
                strange = [value for value in values if value not in of.values]
                if strange or not values:
                    shown = strange[0] if strange else values
                    raise ConfigError(
                        f"space: {key}: when {other} is {shown!r}, which it never is; allowed: "
                        f"{', '.join(map(str, of.values))}"
                    )


NOT_SEARCHED = ("name", "task", "data", "epochs", "metric", "cluster", "seed", "out", "checkpoint")
"""Sections whose keys all trials have in common."""


class Candidates:
    """A search's base, and the configuration that any of its points makes.

    Args:
        search: The search.
        folder: Where its file lies, from which the base is seen.
        overrides: ``key=value`` for the base, beside the search's own ``set``.

    Raises:
        ConfigError: the base is no configuration, or the space or a baseline names a key that it does not
            have.
    """

    def __init__(self, search: Search, folder: Path, overrides: Sequence[str] = ()) -> None:
        self.search = search
        data = search.base if isinstance(search.base, dict) else read_yaml(folder / search.base)
        self._base = copy.deepcopy(data)
        self._base.setdefault("name", search.name)
        changed = flattened(search.set_) if search.set_ else {}
        for key in sorted(changed, key=_names_first):
            set_key(self._base, key, changed[key], f"set: {key}")
        for override in overrides:
            apply_override(self._base, override)
        if search.metric is not None:
            self._base["metric"] = search.metric.model_dump()
        self.base = self.at({}, "base")
        known = flattened(self.base.model_dump())
        self.known = known
        for key in search.space:
            self._see_that_it_exists(key)
            self._see_that_its_condition_may_hold(key)
        for number, baseline in enumerate(search.baselines):
            self.at(baseline, f"baselines.{number}")

    def recorded(self) -> dict[str, Any]:
        """The search as a file of its own, with the base written out."""
        data = self.search.model_dump(by_alias=True, exclude_none=True)
        return {**data, "base": self._base, "set": {}}

    def at(self, point: Mapping[str, Any], where: str = "point") -> Config:
        """The configuration of a point.

        Args:
            point: Key -> value.
            where: How to call it in a complaint.

        Raises:
            ConfigError: these values do not go together.
        """
        data = copy.deepcopy(self._base)
        for key in sorted(point, key=_names_first):
            set_key(data, key, copy.deepcopy(point[key]), f"{where}: {key}")
        try:
            return Config.model_validate(data)
        except ValidationError as error:
            raise ConfigError(f"{where}: {explain(error, model=Config)}") from error

    def _see_that_its_condition_may_hold(self, key: str) -> None:
        """A condition on a key of the base holds always or never.

        Raises:
            ConfigError: the base has no such key, or another value there.
        """
        for other, wanted in (self.search.space[key].when or {}).items():
            values = wanted if isinstance(wanted, list) else [wanted]
            if other in self.search.space:
                continue
            if other not in self.known:
                raise ConfigError(
                    f"space: {key}: when names {other!r}{nearest(other, self.known)}: no such key"
                )
            if self.known[other] not in values:
                raise ConfigError(
                    f"space: {key}: when {other} is {wanted!r}, and the base's {other} is "
                    f"{self.known[other]!r}; allowed: that, or {other} in the space"
                )

    def _see_that_it_exists(self, key: str) -> None:
        """A misspelt key would be found in every trial, one by one.

        Raises:
            ConfigError: the base has no such key, whatever the names of its policy, guards and the like.
        """
        if key in self.known or any(each.startswith(f"{key}.") for each in self.known):
            return
        section = key.partition(".")[0]
        if section in ("policy", "guards", "optimizer", "scheduler", "task_args", "data"):
            self._see_that_it_is_taken(key)
            return
        raise ConfigError(f"space: the base has no key {key!r}{nearest(key, self.known)}")

    def _see_that_it_is_taken(self, key: str) -> None:
        """The keys of these sections depend on their names: try it with each name there may be."""
        values = list(self.search.space[key].values)
        names = self._names_for(key)
        complaints = []
        for name in names:
            try:
                self.at({**name, key: values[0]})
            except ConfigError as error:
                complaints.append(str(error))
            else:
                return
        unknown = [text for text in complaints if "unknown" in text or "no item" in text or "no keys" in text]
        if len(unknown) == len(complaints) and unknown:
            raise ConfigError(f"space: {unknown[0]}")

    def _names_for(self, key: str) -> list[Point]:
        """The names that the key's section may bear in this search: the base's, or the space's."""
        name_key = f"{key.rpartition('.')[0]}.name"
        found: list[Point] = [{}]
        if name_key in self.search.space:
            found += [{name_key: value} for value in self.search.space[name_key].values]
        return found


def _names_first(key: str) -> tuple[bool, str]:
    """A section's name starts the section anew, so it comes before its other keys."""
    return not key.endswith(".name"), key


def load_search(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Search, Path]:
    """Read, override and validate a search file; returns it and its folder.

    Args:
        path: The YAML file. Its stem is the search's name where it has none.
        overrides: ``section.key=value`` of the search file itself.

    Raises:
        ConfigError: one line that begins with the file.
    """
    path = Path(path)
    data = read_yaml(path)
    data.setdefault("name", name_of_file(path))
    for override in overrides:
        apply_override(data, override)
    return parse_search(data, name_with(path, overrides)), path.parent


def parse_search(data: Any, where: str) -> Search:
    """Validate a search.

    Args:
        data: What the file holds.
        where: Its name, for a complaint.

    Raises:
        ConfigError: it is none; one line that begins with the file.
    """
    try:
        return Search.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, model=Search)}") from error

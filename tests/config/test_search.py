"""Searches as files: domains, conditions, candidates, and what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ray_dynbs.config.search import Candidates, Search, load_search
from ray_dynbs.config.space import Domain, draw_points, flattened, grid_combinations, in_order
from ray_dynbs.core.errors import ConfigError

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "tune_configs").glob("*.yaml"))
BASE: dict[str, Any] = {
    "task": "ray_dynbs.tasks.digits",
    "epochs": 3,
    "metric": {"name": "accuracy", "mode": "max"},
    "optimizer": {"name": "sgd", "lr": 0.05},
}


def search(space: dict[str, Any], **more: Any) -> Search:
    return Search.model_validate({"base": BASE, "space": space, **more})


def candidates(space: dict[str, Any], **more: Any) -> Candidates:
    return Candidates(search(space, **more), ROOT)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_search_is_good(path: Path) -> None:
    made, folder = load_search(path)
    found = Candidates(made, folder)
    points = draw_points(made.space, found.known, 20, 0)
    assert points
    assert sum(_makes(found, point) for point in points) >= 0.9 * len(points)


def test_they_are_the_ones_the_readme_names() -> None:
    names = {path.stem for path in SHIPPED}
    assert names == {"fixed_batches", "thresholds", "noise_scale", "lr_rules", "population", "gpu_trials"}
    readme = (ROOT / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in names)


def _makes(found: Candidates, point: dict[str, Any]) -> bool:
    try:
        found.at(point)
    except ConfigError:
        return False
    return True


@given(
    kind=st.sampled_from(["uniform", "loguniform", "int", "logint"]),
    low=st.integers(1, 1_000),
    width=st.integers(1, 10_000),
    seed=st.integers(0, 2**32),
)
def test_a_draw_lies_in_its_range_and_is_of_its_type(kind: str, low: int, width: int, seed: int) -> None:
    number: Any = int if "int" in kind else float
    domain = Domain.model_validate({kind: [number(low), number(low + width)]})
    value = domain.draw(np.random.default_rng(seed))
    assert type(value) is number
    assert low <= value <= low + width


def test_both_ends_of_whole_numbers_are_drawn() -> None:
    for kind in ("int", "logint"):
        rng, domain = np.random.default_rng(0), Domain.model_validate({kind: [2, 5]})
        assert {domain.draw(rng) for _ in range(500)} == {2, 3, 4, 5}


def test_conditions_hold_in_every_point_and_draws_are_reproducible() -> None:
    space = {
        "lr.max_scale": Domain(uniform=[1.5, 8.0], when={"lr.rule": ["linear", "sqrt"]}),
        "lr.rule": Domain(choice=["none", "linear", "sqrt"]),
        "lr.ramp_steps": Domain.model_validate({"int": [1, 9], "when": {"scheduler.name": "none"}}),
    }
    assert in_order(space).index("lr.rule") < in_order(space).index("lr.max_scale")
    points = draw_points(space, {"scheduler.name": "none"}, 60, 3)
    assert points == draw_points(space, {"scheduler.name": "none"}, 60, 3)
    assert points != draw_points(space, {"scheduler.name": "none"}, 60, 4)
    assert {("lr.max_scale" in p) == (p["lr.rule"] != "none") for p in points} == {True}
    assert all("lr.ramp_steps" in point for point in points)
    assert not any("lr.ramp_steps" in p for p in draw_points(space, {"scheduler.name": "StepLR"}, 9, 0))


def test_grids_are_multiplied_and_those_without_their_condition_counted_once() -> None:
    space = {
        "lr.rule": Domain(grid=["none", "linear"]),
        "lr.max_scale": Domain(grid=[2.0, 4.0], when={"lr.rule": "linear"}),
        "optimizer.lr": Domain(uniform=[0.1, 0.2]),
    }
    assert grid_combinations(space, {}) == [
        {"lr.rule": "none"},
        {"lr.rule": "linear", "lr.max_scale": 2.0},
        {"lr.rule": "linear", "lr.max_scale": 4.0},
    ]
    assert len(draw_points(space, {}, 2, 0)) == 6


def test_a_point_makes_a_configuration_a_name_before_its_keys() -> None:
    found = candidates({"policy.eta": {"uniform": [0.1, 0.9]}}, set={"policy": {"name": "norm_test"}})
    made = found.at(
        {"policy.dead_zone": 0.2, "policy.eta": 0.25, "guards.0.epochs": 1, "policy.name": "norm_test"}
    )
    assert (made.policy["name"], made.policy["eta"], made.policy["dead_zone"]) == ("norm_test", 0.25, 0.2)
    assert made.guards[0]["epochs"] == 1
    assert found.at({}).guards[0]["epochs"] == 2  # nothing is left of the other point


def test_the_recorded_search_makes_the_same_configurations(tmp_path: Path) -> None:
    found = candidates({"optimizer.lr": {"loguniform": [0.01, 0.1]}}, set={"epochs": 7, "lr.rule": "sqrt"})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(found.recorded()))
    again = Candidates(*load_search(tmp_path / "config.yaml"))
    assert again.at({"optimizer.lr": 0.05}) == found.at({"optimizer.lr": 0.05})


def test_nested_keys_are_flattened_and_lists_left_alone() -> None:
    assert flattened({"a": {"b": 1, "c": {}}, "d": [1, {"e": 2}]}) == {
        "a.b": 1,
        "a.c": {},
        "d": [1, {"e": 2}],
    }


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": (
        {"space": {"batch.initail": {"int": [8, 64]}}},
        "no key 'batch.initail' (did you mean 'batch.in",
    ),
    "unknown section": (
        {"space": {"batches.initial": {"int": [8, 64]}}},
        "space: the base has no key 'batches.in",
    ),
    "unknown policy key": (
        {"space": {"policy.grad_norm_lw": {"uniform": [0.1, 1.0]}}},
        "policy.grad_norm_lw: unknown key (did you mean 'grad_norm_low'?)",
    ),
    "unknown guard": ({"space": {"guards.5.epochs": {"int": [1, 2]}}}, "'5' is no item of a list of 2"),
    "baseline's key": (
        {"space": {"optimizer.lr": {"uniform": [0.1, 1.0]}}, "baselines": [{"batch.size": 3}]},
        "baselines.0: batch.size: unknown key",
    ),
    "baseline's value": (
        {"space": {"optimizer.lr": {"uniform": [0.1, 1.0]}}, "baselines": [{"batch.initial": 0}]},
        "baselines.0: batch.initial is 0; allowed: >= 1",
    ),
    "two kinds": (
        {"space": {"optimizer.lr": {"uniform": [0.1, 1.0], "grid": [1.0]}}},
        "exactly one of choice, grid",
    ),
    "no kind": ({"space": {"optimizer.lr": {}}}, "nothing given; allowed: exactly one of"),
    "ends": (
        {"space": {"optimizer.lr": {"uniform": [1.0, 0.1]}}},
        "allowed: [low, high] with low below high",
    ),
    "three ends": ({"space": {"optimizer.lr": {"uniform": [0.1, 0.2, 0.3]}}}, "allowed: [low, high]"),
    "logarithm": ({"space": {"optimizer.lr": {"loguniform": [0.0, 0.1]}}}, "allowed: above 0"),
    "no values": ({"space": {"optimizer.lr": {"choice": []}}}, "choice"),
    "circle": (
        {
            "space": {
                "lr.rule": {"choice": ["none"], "when": {"lr.ramp_steps": 1}},
                "lr.ramp_steps": {"int": [1, 2], "when": {"lr.rule": "none"}},
            }
        },
        "space: the conditions of lr.ramp_steps, lr.rule depend on each other",
    ),
    "empty space": ({"space": {}}, "space"),
    "grid and draws": (
        {"space": {"optimizer.lr": {"uniform": [0.1, 1.0]}}, "search": {"algorithm": "grid"}},
        "search.algorithm is 'grid'; allowed: grids only",
    ),
    "optuna and grids": (
        {"space": {"optimizer.lr": {"grid": [0.1]}}, "search": {"algorithm": "optuna"}},
        "search.algorithm is 'optuna', and the space has grids",
    ),
    "pbt and asha": (
        {"space": {"optimizer.lr": {"uniform": [0.1, 1.0]}}, "search": {"algorithm": "pbt"}},
        "search.algorithm is 'pbt'; allowed: no `when`, and scheduler: {name: none}",
    ),
    "unknown algorithm": (
        {"space": {"optimizer.lr": {"uniform": [0.1, 1.0]}}, "search": {"algorithm": "optima"}},
        "search.algorithm is 'optima' (did you mean 'optuna'?)",
    ),
    "data": ({"space": {"data.train": {"choice": ["a"]}}}, "space: data.train cannot be searched"),
    "epochs": ({"space": {"epochs": {"grid": [2, 6]}}}, "space: epochs cannot be searched"),
    "workers": ({"space": {"cluster.num_workers": {"grid": [1, 2]}}}, "cluster.num_workers cannot be"),
    "seed": ({"space": {"seed": {"int": [1, 2]}}}, "space: seed cannot be searched"),
    "condition's key": (
        {"space": {"optimizer.lr": {"choice": [0.1], "when": {"polcy.name": "threshold"}}}},
        "when names 'polcy.name' (did you mean 'policy.name'?): no such key",
    ),
    "condition's value": (
        {"space": {"optimizer.lr": {"choice": [0.1], "when": {"policy.name": "treshold"}}}},
        "when policy.name is 'treshold', and the base's policy.name is 'threshold'; allowed: that",
    ),
    "condition never": (
        {
            "space": {
                "lr.rule": {"choice": ["none", "linear"]},
                "lr.max_scale": {"uniform": [1.5, 8.0], "when": {"lr.rule": "sqrt"}},
            }
        },
        "when lr.rule is 'sqrt', which it never is; allowed: none, linear",
    ),
    "condition on a range": (
        {
            "space": {
                "optimizer.lr": {"uniform": [0.1, 0.2]},
                "lr.ramp_steps": {"int": [1, 8], "when": {"optimizer.lr": 0.1}},
            }
        },
        "when names optimizer.lr, a uniform; allowed: a choice or grid",
    ),
    "grid on a choice": (
        {
            "space": {
                "lr.rule": {"choice": ["none", "linear"]},
                "lr.max_scale": {"grid": [2.0, 4.0], "when": {"lr.rule": "linear"}},
            }
        },
        "when names lr.rule, a choice; allowed: a grid",
    ),
    "huge": ({"space": {"lr.ramp_steps": {"int": [1, 10**17]}}}, "allowed: numbers of at most 9.0072e+15"),
    "pbt and baselines": (
        {
            "space": {"optimizer.lr": {"uniform": [0.1, 1.0]}},
            "search": {"algorithm": "pbt"},
            "scheduler": {"name": "none"},
            "baselines": [{"optimizer.lr": 0.2}],
        },
        "search.algorithm is 'pbt', which would mutate baselines",
    ),
    "base": (
        {"base": {**BASE, "epochs": 0}, "space": {"optimizer.lr": {"choice": [0.1]}}},
        "base: epochs is 0",
    ),
    "base's file": (
        {"base": "nowhere.yaml", "space": {"optimizer.lr": {"choice": [0.1]}}},
        "nowhere.yaml: No such",
    ),
    "metric's mode": (
        {"space": {"optimizer.lr": {"choice": [0.1]}}, "metric": {"name": "accuracy", "mode": "most"}},
        "metric.mode is 'most'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input(case: str, tmp_path: Path) -> None:
    data, words = WRONG[case]
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({"base": BASE, **data}))
    with pytest.raises(ConfigError) as caught:
        Candidates(*load_search(tmp_path / "s.yaml"))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_baseline_may_have_a_policy_of_its_own() -> None:
    found = candidates(
        {"optimizer.lr": {"choice": [0.1]}},
        baselines=[{"policy.name": "noise_scale", "policy.multiplier": 2.0}],
    )
    assert found.at(found.search.baselines[0]).policy["multiplier"] == 2.0


def test_keys_of_a_policy_that_the_space_chooses_are_known() -> None:
    found = candidates(
        {
            "policy.name": {"choice": ["noise_scale", "plateau"]},
            "policy.multiplier": {"uniform": [1.0, 2.0], "when": {"policy.name": "noise_scale"}},
            "policy.patience": {"int": [1, 3], "when": {"policy.name": "plateau"}},
        }
    )
    for point in draw_points(found.search.space, found.known, 20, 0):
        assert found.at(point).policy["name"] == point["policy.name"]

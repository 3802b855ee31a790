"""Which keys of a search mattered."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

FEWEST = 6
"""Trials below which nothing is said."""


def importances(rows: Sequence[Mapping[str, Any]], params: Sequence[str], mode: str) -> dict[str, float]:
    """Share of each key in what made trials good (PED-ANOVA, Watanabe et al. 2023, arXiv 2304.10255).

    Over the keys that most trials have, those that took several values, and the trials that have them.

    Args:
        rows: Trials, with ``value`` and their keys.
        params: Names of the keys.
        mode: ``max`` or ``min``.

    Returns:
        Key -> importance; empty where there are too few trials or keys, or all are worth the same.
    """
    import optuna
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    # Keys that only some trials have (conditions, baselines) would leave next to none with all of them.
    counts = {name: sum(row[name] is not None for row in rows) for name in params}
    shared = [name for name in params if counts[name] == max(counts.values()) >= FEWEST]
    rows = [row for row in rows if all(row[name] is not None for name in shared)]
    spaces = {name: _distribution([row[name] for row in rows]) for name in shared}
    varied = {name: space for name, space in spaces.items() if space is not None}
    if len(rows) < FEWEST or len(varied) < 2 or len({row["value"] for row in rows}) < 2:
        return {}
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize" if mode == "max" else "minimize")
    for row in rows:
        values = {name: _plain(row[name], space) for name, space in varied.items()}
        study.add_trial(optuna.create_trial(params=values, distributions=varied, value=row["value"]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the evaluator is marked as experimental
        evaluator = PedAnovaImportanceEvaluator()
        warnings.filterwarnings("error", message="Target and region quantiles")
        try:
            found: dict[str, float] = get_param_importances(study, evaluator=evaluator)
        except UserWarning:  # too many trials are as good as the best: it would call all keys alike
            return {}
    return found


def _distribution(values: list[Any]) -> Any:
    """The range that the values cover; ``None`` where there is but one."""
    import optuna

    if len(set(map(str, values))) < 2:
        return None
    if all(type(value) in (int, float) for value in values):
        low, high = float(min(values)), float(max(values))
        return optuna.distributions.FloatDistribution(low, high, log=low > 0 and high / low > 5)
    return optuna.distributions.CategoricalDistribution(sorted(set(map(str, values))))


def _plain(value: Any, space: Any) -> Any:
    return str(value) if hasattr(space, "choices") else float(value)

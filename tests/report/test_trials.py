"""A trial in one line, as a search tells it and as its table, read again, has it."""

from __future__ import annotations

from ray_dynbs.report.trials import trial_line


def test_keys_that_a_trial_has_not_are_left_out() -> None:
    """In the table every row has every key; a conditional one, or a baseline's, is empty."""
    row = {
        "status": "finished",
        "error": None,
        "epochs": 3,
        "value": 0.95,
        "spread": 0.0,
        "values": [0.95],
        "cost": None,
        "param.lr.rule": "linear",
        "param.lr.max_scale": None,
    }
    assert trial_line(row, "accuracy", None) == "accuracy 0.9500 in 3 epochs; lr.rule=linear"
    baseline = {**row, "param.lr.rule": None}
    assert trial_line(baseline, "accuracy", "steps") == (
        "accuracy 0.9500 in 3 epochs, target not reached; the base"
    )

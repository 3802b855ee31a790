"""A mean returned by mistake is found on a few rows; nothing else is mistaken for one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.plan import BatchPlan
from ray_dynbs.training.sums import check_loss_is_sum, refuse_mean
from tests.support import run_ranks, squared_error, table, training_loop

ROWS = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(16) % 3


def probe(loss: Any, model: nn.Module | None = None) -> str | None:
    model = model or nn.Linear(5, 3)
    pieces = [{"x": ROWS[a:b], "y": LABELS[a:b]} for a, b in ((0, 16), (0, 16), (0, 8), (8, 16))]
    return check_loss_is_sum(lambda batch: loss(model, batch), pieces, model)


def entropy(model: Any, batch: Any, **options: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], **options)


def tokens(batch: Any) -> torch.Tensor:
    return (batch["y"] != 1).sum()


def contrastive(model: Any, batch: Any) -> Any:
    """Couples its rows: adds up to nothing, and is not refused."""
    scores = model(batch["x"]) @ model(batch["x"]).T
    return F.cross_entropy(scores, torch.arange(len(scores)), reduction="sum"), len(scores)


SUMS = {
    "rows": lambda m, b: (entropy(m, b, reduction="sum"), len(b["y"])),
    "tokens": lambda m, b: (entropy(m, b, reduction="sum", ignore_index=1), tokens(b)),
    "mean times weight": lambda m, b: (entropy(m, b) * len(b["y"]), len(b["y"])),
    "with scores": lambda m, b: (entropy(m, b, reduction="sum"), len(b["y"]), m(b["x"])),
    "zero": lambda m, b: (entropy(m, b, reduction="sum") * 0, len(b["y"])),
    "contrastive": contrastive,
}
MEANS = {
    "mean": (lambda m, b: (entropy(m, b), len(b["y"])), "loss is .*: a mean; allowed: the sum"),
    "mean over tokens": (lambda m, b: (entropy(m, b, ignore_index=1), tokens(b)), "a mean; allowed: the sum"),
    "mean with weight 1": (lambda m, b: (entropy(m, b), 1), "weight 1 on a batch, 1 and 1 on its halves"),
    "sum with weight 1": (lambda m, b: (entropy(m, b, reduction="sum"), 1), "weights that add up"),
    "no pair": (lambda m, b: entropy(m, b), r"loss returned Tensor of shape \(\)"),
    "per row": (lambda m, b: (entropy(m, b, reduction="none"), 16), r"a tensor of shape \(16,\)"),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_pass(name: str) -> None:
    assert probe(SUMS[name]) is None


@pytest.mark.parametrize("name", MEANS)
def test_what_is_no_sum_is_refused_and_told_what_to_be(name: str) -> None:
    loss, words = MEANS[name]
    with pytest.raises(ConfigError, match=words):
        probe(loss)


def test_dropout_and_batchnorm_do_not_disturb_and_nothing_is_left_changed() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    model[1].eval()
    before, modes = (
        {k: v.clone() for k, v in model.state_dict().items()},
        [m.training for m in model.modules()],
    )
    random = torch.get_rng_state()
    probe(SUMS["rows"], model)
    assert torch.equal(torch.get_rng_state(), random)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_loss_that_fails_in_evaluation_mode_is_left_to_the_step() -> None:
    def detector(model: Any, batch: Any) -> Any:
        if not model.training:
            raise ValueError("in eval mode this model returns boxes")
        return entropy(model, batch), 1

    assert probe(detector) == "in evaluation mode it raises ValueError"


def test_random_masks_are_not_taken_for_a_wrong_weight() -> None:
    """As masked language models draw them: other tokens count at every call."""

    def masked(model: Any, batch: Any) -> Any:
        mask = torch.rand(len(batch["y"])) < 0.5
        return (entropy(model, batch, reduction="none") * mask).sum(), mask.sum()

    assert probe(masked) == "it does not repeat itself on the same rows"


def test_the_probe_undoes_what_forwards_do() -> None:
    """Buffers, numpy's and Python's random numbers; a train() of one's own, which may merge, is not met."""

    class Layer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(5, 3)
            self.register_buffer("calls", torch.zeros(()))

        def train(self, mode: bool = True) -> Any:
            raise AssertionError("merges its adapter")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1  # type: ignore[operator]
            np.random.random()
            random.random()
            return super().forward(x)

    model, states = Layer(), (np.random.get_state()[1].tolist(), random.getstate())
    probe(SUMS["rows"], model)
    assert model.calls == 0
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states


def test_where_it_cannot_be_told_the_loop_says_so_once() -> None:
    model, loop = training_loop(table(20), BatchPlan.fit(8, 1))
    loss = squared_error(model)
    loop.train_epoch(lambda batch: (loss(batch)[0] * (1 + torch.rand(())), len(batch["y"])))
    (note,) = loop.take_notes()
    assert note == "whether the loss is a sum could not be told: it does not repeat itself on the same rows"
    assert loop.take_notes() == []


def test_one_row_is_no_probe_but_the_next_step_may_be() -> None:
    model, loop = training_loop(table(20), BatchPlan.fit(1, 1))
    loss = squared_error(model)
    batches = loop.batches()
    loop.step(next(batches), lambda batch: (loss(batch)[0] / len(batch["y"]), len(batch["y"])))
    loop._feed.set_plan(BatchPlan.fit(8, 1))
    with pytest.raises(ConfigError, match="a mean"):
        loop.step(next(batches), lambda batch: (loss(batch)[0] / len(batch["y"]), len(batch["y"])))


def collective_loss() -> float:
    """A loss that counts the weight over all ranks: the probe is taken by all of them alike."""
    model, loop = training_loop(table(16), BatchPlan.fit(8, 2))
    loss = squared_error(model)

    def with_collective(batch: Any) -> Any:
        dist.all_reduce(torch.zeros(1))
        return loss(batch)

    return loop.train_epoch(with_collective).totals.loss


def test_a_loss_with_a_collective_in_it_does_not_hang() -> None:
    assert len(set(run_ranks(collective_loss, 2))) == 1


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=20), st.integers(1, 10))
def test_any_sum_of_positive_losses_passes_and_its_mean_does_not(losses: list[float], cut: int) -> None:
    cut = min(cut, len(losses) - 1)
    pieces = [losses, losses[:cut], losses[cut:]]
    refuse_mean("loss", *((sum(piece), float(len(piece))) for piece in pieces))
    with pytest.raises(ConfigError, match="a mean"):
        refuse_mean("loss", *((sum(piece) / len(piece), float(len(piece))) for piece in pieces))


def test_the_first_step_of_a_run_looks() -> None:
    model, loop = training_loop(table(20), BatchPlan.fit(8, 1))
    loss = squared_error(model)
    with pytest.raises(ConfigError, match="a mean"):
        loop.train_epoch(lambda batch: (loss(batch)[0] / len(batch["y"]), len(batch["y"])))
    assert loop.progress.step == 0

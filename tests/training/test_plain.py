"""Models as users wrap them: DDP becomes a mere wrapper, sharded ones are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.lr import Adjustment
from ray_dynbs.core.plan import BatchPlan
from ray_dynbs.training.plain import plain_model
from ray_dynbs.training.precision import MixedPrecision
from ray_dynbs.training.step import OptimizerStep
from ray_dynbs.training.world import World
from tests.support import flat_weights, run_ranks, small_model, squared_error, table

WHOLE = table(40)


class WithAdapter(nn.Module):
    """Partly frozen, as LoRA does it: a frozen layer plus a trained low-rank one, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.base = nn.Linear(5, 4)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.head = nn.Linear(4, 1)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.base(x) + self.up(self.down(x))
        return self.head(hidden.tanh())


def ddp_weights(kind: Any, options: dict[str, Any], wrapped: bool) -> tuple[np.ndarray, list[str]]:
    """Twenty steps of uneven sizes, the loss calling the wrapped model as a user's loop does."""
    from ray_dynbs.training.columns import ColumnStore
    from ray_dynbs.training.feed import IndexedFeed

    world = World.current()
    model = kind()
    outer = DistributedDataParallel(model, **options) if wrapped else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    plan = BatchPlan.fit(11, world.size, 3)
    step = OptimizerStep(plain_model(outer), optimizer, world, MixedPrecision("fp64", world.device))
    feed = IndexedFeed(
        ColumnStore([WHOLE]), rank=world.rank, plan=plan, seed=0, shuffle="full", device=world.device
    )
    for epoch in range(5):
        for batch in feed.epoch(epoch):
            step.run(batch.micro_batches(), squared_error(outer), rows=batch.rows, adjustment=Adjustment(1.0))
            if world.rank == 0:  # a forward of its own, as for a running metric: no collective may wait
                outer(torch.zeros(2, 5, dtype=torch.float64))
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad and p.grad is not None]
    return flat_weights(model), frozen


@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}, {"static_graph": True}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_a_ddp_model_trains_like_the_bare_one(options: dict[str, Any]) -> None:
    alone, _ = ddp_weights(WithAdapter, {}, False)
    for weights, frozen_with_gradient in run_ranks(ddp_weights, 2, WithAdapter, options, True):
        np.testing.assert_allclose(weights, alone, rtol=1e-10)
        assert not frozen_with_gradient


def refusals() -> list[str]:
    """The messages for sharded models, in a process group of one."""
    fake = type("DeepSpeedEngine", (nn.Linear,), {"__module__": "deepspeed.runtime.engine"})
    sharded = small_model()
    fully_shard(sharded)
    models = [
        FullyShardedDataParallel(small_model(), device_id=torch.device("cpu")),
        sharded,
        nn.Sequential(fake(2, 2)),
        nn.DataParallel(nn.Linear(2, 2)),
    ]
    found = []
    for model in models:
        with pytest.raises(ConfigError) as caught:
            plain_model(model)
        found.append(str(caught.value))
    return found


def test_sharded_models_are_refused_in_one_line() -> None:
    (messages,) = run_ranks(refusals, 1)
    for message, word in zip(messages, ["FSDP", "FSDP", "DeepSpeed", "DataParallel"], strict=True):
        assert word in message
        assert "\n" not in message
        assert "allowed: plain models and DDP" in message

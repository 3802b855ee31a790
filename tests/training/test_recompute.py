"""Activation checkpointing: less is kept, and nothing else changes."""

from __future__ import annotations

import copy
import io
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.plan import BatchPlan
from ray_dynbs.training import allocator
from ray_dynbs.training.allocator import NAMES, SETTING, prefer_expandable_segments
from ray_dynbs.training.recompute import checkpoint_activations
from tests.support import flat_weights, squared_error, table, training_loop


class Block(nn.Module):
    """BatchNorm, dropout, an argument by name."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.norm, self.dropout = nn.BatchNorm1d(32, momentum=momentum), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.down(self.dropout(torch.tanh(self.norm(self.up(x)))))


class Net(nn.Module):
    """Layers that repeat, between two that do not."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Block(momentum) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.last(x)


def net(momentum: float | None = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return Net(momentum).double()


def traced(model: nn.Module) -> tuple[int, list[bytes]]:
    """Bytes that a forward keeps for the backward, and all that a step of it leaves behind."""
    kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    torch.manual_seed(5)
    x = torch.randn(16, 5, dtype=torch.float64)
    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(x).square().sum()
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    left = [loss.detach(), *gradients, *model.buffers(), torch.get_rng_state()]
    return kept, [each.numpy().tobytes() for each in left]


@pytest.mark.parametrize("layers", ["auto", ["Block"]])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_gradients_statistics_and_random_numbers_are_the_same_bit_by_bit(
    layers: Any, momentum: float | None
) -> None:
    plain, saving = net(momentum), net(momentum)
    names = list(saving.state_dict())
    assert checkpoint_activations(saving, layers) == {"Block": 4}
    assert list(saving.state_dict()) == names
    assert isinstance(saving.blocks[0], Block)
    for _ in range(2):
        (most, expected), (least, found) = traced(plain), traced(saving)
        assert found == expected
        assert least < most / 5


def test_a_copy_of_the_model_is_one_of_its_own() -> None:
    """An average of the weights, say; a copy that called the original's layers would go unnoticed."""
    model = net()
    checkpoint_activations(model, "auto")
    expected = traced(net())[1]
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    copies.append(torch.load(saved, weights_only=False))
    for each in copies:
        kept, found = traced(each)
        assert found == expected
        assert kept < traced(net())[0] / 5
        with torch.no_grad():
            each.blocks[0].up.weight.zero_()
    assert traced(model)[1] == expected


class Lucky(nn.Module):
    """Draws from everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x * random.uniform(0.5, 1.5))) * float(np.random.rand())


def test_random_numbers_from_anywhere_are_the_same_again() -> None:
    gradients, states = [], []
    for recomputes in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = nn.Sequential(*[Lucky() for _ in range(3)])
        if recomputes:
            assert checkpoint_activations(model, "auto") == {"Lucky": 3}
        model(torch.ones(4, 8)).sum().backward()
        gradients.append([p.grad.tolist() for p in model.parameters()])
        states.append((random.random(), np.random.rand()))
    assert gradients[0] == gradients[1]
    assert states[0] == states[1]


class Slotted(nn.Module):
    """A class that knows how it is copied."""

    __slots__ = ("note",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "copied": True}


@pytest.mark.parametrize("layer", [nn.LSTM(8, 8), Slotted()])
def test_layers_that_are_copied_in_their_own_way(layer: nn.Module) -> None:
    model = nn.ModuleList([layer])
    expected = vars(copy.deepcopy(model)[0]).keys()
    checkpoint_activations(model, [type(layer).__name__])
    assert vars(copy.deepcopy(model)[0]).keys() == expected
    assert type(copy.deepcopy(model)[0]) is type(model[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_trains() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2)])
    checkpoint_activations(model, "auto")
    torch.compile(model, backend="eager")(torch.randn(4, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert [int(layer[1].num_batches_tracked) for layer in model] == [1, 1]


def test_an_evaluation_runs_once() -> None:
    model = net().eval()
    checkpoint_activations(model, "auto")
    calls = []
    model.blocks[0].up.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model(torch.ones(4, 5, dtype=torch.float64))
    assert len(calls) == 1


def test_training_is_the_same() -> None:
    weights = []
    for layers in (None, "auto"):
        torch.manual_seed(0)
        model, loop = training_loop(
            table(60),
            BatchPlan.fit(16, 1, 5),
            make_model=lambda: nn.Sequential(
                nn.Linear(5, 8),
                *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)),
                nn.Linear(8, 1),
            ).double(),
        )
        if layers:
            assert checkpoint_activations(model, layers) == {"Sequential": 3}
        loop.train_epoch(squared_error(model))
        weights.append(flat_weights(model))
    assert (weights[0] == weights[1]).all()


class Own(nn.Module):
    """A model that knows how to do it itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.asked: Any = None

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        self.asked = gradient_checkpointing_kwargs


def test_a_model_of_transformers_does_it_in_its_own_way() -> None:
    """Its layers fill caches of keys, which a repetition would fill twice."""
    model = Own()
    assert checkpoint_activations(model, "auto") == {"Own": 1}
    assert model.asked == {"use_reentrant": False}
    with pytest.raises(ConfigError, match="names layers of Own, which does it in its own way; allowed: auto"):
        checkpoint_activations(nn.Sequential(Own(), nn.Linear(1, 1)), ["Block"])
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 40, "n_positions": 16}
    gradients = []
    for saves in (False, True):
        torch.manual_seed(0)
        gpt = GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)).train()
        if saves:
            checkpoint_activations(gpt, "auto")
        rows = torch.arange(24).reshape(2, 12)
        gpt(input_ids=rows, labels=rows).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in gpt.parameters()]))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("model", "layers", "complaint"),
    [
        (nn.Linear(2, 2), "auto", "no layers that repeat in a ModuleList or Sequential; allowed: names"),
        (net(), ["Blok"], "names 'Blok', which the model has no layer of; allowed: Block"),
        (net(), ["Net"], "names 'Net', the model itself"),
    ],
)
def test_layers_that_are_not_there(model: nn.Module, layers: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        checkpoint_activations(model, layers)


def test_expandable_segments_unless_the_user_says_something(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[str] = []
    monkeypatch.setattr(allocator.torch._C, "_accelerator_setAllocatorSettings", applied.append)
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    assert not prefer_expandable_segments(torch.device("cpu"))
    for name in NAMES:
        monkeypatch.setenv(name, "max_split_size_mb:128")
        assert not prefer_expandable_segments(torch.device("cuda"))
        monkeypatch.delenv(name)
    assert applied == []
    assert prefer_expandable_segments(torch.device("cuda"))
    assert applied == [SETTING]
    import os

    assert os.environ.pop(NAMES[0]) == SETTING

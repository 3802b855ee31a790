"""Train loops as users write them, having adopted ray_dynbs, and plain loops that they have to equal."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ray_dynbs
from ray_dynbs.core.order import epoch_order
from tests.support import flat_weights, squared_error, table
from tests.training.test_plain import WithAdapter

NUM_ROWS, EPOCHS, SIZES = 61, 5, [9, 33, 2, 61, 17]


def adapter_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups with LRs of their own, the second without weight decay; a frozen parameter is among them."""
    head = [p for name, p in model.named_parameters() if "head" in name]
    rest = [p for name, p in model.named_parameters() if "head" not in name]
    groups = [{"params": rest, "lr": 0.02}, {"params": head, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01)


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 20)


def adapter_loop(config: dict[str, Any]) -> dict[str, Any]:
    """Frozen parameters under DDP, parameter groups, LambdaLR, own validation, report and checkpoints."""
    model = ray.train.torch.prepare_model(WithAdapter())
    optimizer = adapter_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
    run = ray_dynbs.prepare(model, optimizer, scheduler)
    saved = ray.train.get_checkpoint()
    if saved is not None:
        with saved.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=True)
        getattr(model, "module", model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        run.load_state_dict(state["run"])
    losses, rank = [], ray.train.get_context().get_world_rank()
    for epoch in range(run.epoch, EPOCHS):
        for number, batch in enumerate(run.batches()):
            losses.append(run.step(batch, squared_error(model)).loss.item())
            if epoch == config.get("fail_in") and number == 1 and rank == 0 and saved is None:
                raise ZeroDivisionError("this worker was told to fail")
        run.log(loss=1.0 / (epoch + 1))
        state = {
            "model": getattr(model, "module", model).state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "run": run.state_dict() if rank == 0 else None,
        }
        report_with_state({"epoch": epoch}, state, rank)
    return {
        "losses": losses,
        "weights": flat_weights(model),
        "lrs": [g["lr"] for g in optimizer.param_groups],
    }


def report_with_state(metrics: dict[str, Any], state: Any, rank: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = None
        if rank == 0:
            torch.save(state, Path(folder) / "state.pt")
            saved = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=saved)


def plain_adapter_loop() -> dict[str, Any]:
    """What :func:`adapter_loop` has to equal: one process, fixed sizes per epoch, LR times sqrt(B / 9)."""
    model = WithAdapter()
    optimizer = adapter_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
    rows, per_epoch = table(NUM_ROWS), -(-NUM_ROWS // 9)
    x = torch.from_numpy(np.stack(rows["x"].to_pylist()))
    y = torch.from_numpy(rows["y"].to_numpy())
    losses, count = [], 0
    for epoch in range(EPOCHS):
        order = epoch_order(NUM_ROWS, seed=0, epoch=epoch, shuffle="window")
        for start in range(0, NUM_ROWS, SIZES[epoch]):
            index = torch.from_numpy(order[start : start + SIZES[epoch]])
            optimizer.zero_grad()
            loss_sum, weight = squared_error(model)({"x": x[index], "y": y[index]})
            (loss_sum / weight).backward()
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 2.0)
            base = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] *= (SIZES[epoch] / 9) ** 0.5
            optimizer.step()
            for group, lr in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = lr
            due = epoch * per_epoch - (-min(start + SIZES[epoch], NUM_ROWS) // 9)
            for _ in range(due - count):
                scheduler.step()
            count = due
            losses.append(float((loss_sum / weight).detach()))
    return {
        "losses": losses,
        "weights": flat_weights(model),
        "lrs": [g["lr"] for g in optimizer.param_groups],
    }


class Sentences(Dataset[list[int]]):
    """Rows of different lengths: numbers that follow a rule a language model can learn."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> list[int]:
        return [(index + 3 * place) % 11 for place in range(3 + index % 5)]


def pad(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Ragged rows as padded tokens; the padding is no label."""
    longest = max(len(row) for row in rows)
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def language_model() -> nn.Module:
    """A Hugging Face model built from its configuration; nothing is downloaded."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 11, "n_positions": 16}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    silent = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, **silent)).double()
    return model


def token_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """The model's own loss is a mean over tokens: times their number it is the sum; scores come along."""
    output = model(**batch)
    tokens = (batch["labels"][:, 1:] != -100).sum()
    return output.loss * tokens, tokens, output.logits.detach()


def language_loop(config: dict[str, Any]) -> dict[str, Any]:
    """A Hugging Face model on a DataLoader of ragged rows; left after seven steps in the middle of a pass."""
    model = ray.train.torch.prepare_model(language_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = ray.train.torch.prepare_data_loader(DataLoader(Sentences(), batch_size=99, collate_fn=pad))
    run = ray_dynbs.prepare(model, optimizer, data=loader)
    losses: list[float] = []
    rows = 0
    while len(losses) < 7:
        for batch in run.batches():
            result = run.step(batch, lambda micro: token_loss(model, micro))
            rows += sum(len(scores) for scores in result.outputs)
            losses.append(result.loss.item())
            if len(losses) == 7:
                break
    ray.train.report({"loss": losses[-1]})
    return {"losses": losses, "rows": rows, "weights": flat_weights(getattr(model, "module", model))}


def plain_language_loop() -> dict[str, Any]:
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, losses, epoch = Sentences(), [], 0
    while len(losses) < 7:
        order = epoch_order(len(data), seed=0, epoch=epoch, shuffle="full")
        for start in range(0, len(data), 5):
            optimizer.zero_grad()
            loss_sum, weight, _ = token_loss(model, pad([data[int(i)] for i in order[start : start + 5]]))
            (loss_sum / weight).backward()
            optimizer.step()
            losses.append(float((loss_sum / weight).detach()))
            if len(losses) == 7:
                break
        epoch += 1
    return {"losses": losses, "weights": flat_weights(model)}


def lazy_loop(config: dict[str, Any]) -> None:
    raise AssertionError("never started")


def forgetful_loop(config: dict[str, Any]) -> int:
    """Steps a mean, which is found out."""
    model = ray.train.torch.prepare_model(nn.Linear(5, 1).double())
    run = ray_dynbs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in run.batches():
        run.step(batch, lambda rows: (squared_error(model)(rows)[0] / len(rows["y"]), len(rows["y"])))
    return 0

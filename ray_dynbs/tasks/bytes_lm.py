"""A byte-level GPT on the source text of the Python standard library that runs it.

Nothing is downloaded: the text is what lies beside the interpreter. Weights are counted in tokens (here:
bytes), so losses are nats per byte. ``task_args``:

* ``megabytes``: text to train on, 4; a further tenth is kept for validation
* ``context``: bytes per row, 128
* ``layers``, ``width``, ``heads``: 4, 128, 4, which makes 0.84 million parameters
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from torch import nn

from ray_dynbs.config import Config
from ray_dynbs.core.errors import ConfigError

VOCABULARY = 256
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Arguments:
    """``task_args``; see the module's docstring."""

    megabytes: float = 4.0
    context: int = 128
    layers: int = 4
    width: int = 128
    heads: int = 4

    @classmethod
    def of(cls, config: Config) -> Arguments:
        """Read ``task_args``.

        Raises:
            ConfigError: an unknown argument, or one that is no number above 0.
        """
        allowed = [field.name for field in fields(cls)]
        for key, value in config.task_args.items():
            if key not in allowed:
                raise ConfigError(f"task_args.{key}: unknown key; allowed: {', '.join(allowed)}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"task_args.{key} is {value!r}; allowed: a number > 0")
        arguments = cls(**config.task_args)
        if arguments.width % arguments.heads:
            raise ConfigError(
                f"task_args: width is {arguments.width} and heads is {arguments.heads}; "
                "allowed: a width that heads divides"
            )
        return arguments


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a norm (GPT-2's order)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, bytes, width] -> the same."""
        rows, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        mixed: torch.Tensor = x + self.mlp(self.before_mlp(x))
        return mixed


class ByteGPT(nn.Module):
    """Bytes [rows, length] -> scores of the next byte [rows, length, 256]."""

    def __init__(self, arguments: Arguments) -> None:
        super().__init__()
        width = arguments.width
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(arguments.context, width)
        self.blocks = nn.ModuleList(Block(width, arguments.heads) for _ in range(arguments.layers))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Scores; the output layer shares its weights with the input embedding."""
        x = self.token(text) + self.position.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = F.linear(self.norm(x), self.token.weight)
        return scores


def standard_library_text(num_bytes: int) -> bytes:
    """The first bytes of the standard library's modules, in the order of their names.

    Raises:
        ConfigError: there is less text than that.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text, parts = 0, []
    for path in sorted(p for p in folder.rglob("*.py") if "site-packages" not in p.parts):
        data = path.read_bytes()
        parts.append(data)
        text += len(data)
        if text >= num_bytes:
            return b"".join(parts)[:num_bytes]
    raise ConfigError(f"task_args.megabytes: the standard library here has {text / 1e6:.1f} MB of text")


def datasets(config: Config) -> dict[str, pa.Table]:
    """Rows of ``context + 1`` bytes; the last eleventh of the text is for validation."""
    arguments = Arguments.of(config)
    row = arguments.context + 1
    text = np.frombuffer(standard_library_text(int(arguments.megabytes * 1.1e6)), dtype=np.uint8)
    rows = text[: len(text) // row * row].reshape(-1, row)
    cut = int(len(rows) / 1.1)
    return {"train": _table(rows[:cut]), "validation": _table(rows[cut:])}


def _table(rows: Bytes) -> pa.Table:
    flat = pa.array(rows.reshape(-1))
    return pa.table({"text": pa.FixedSizeListArray.from_arrays(flat, rows.shape[1])})


def about(config: Config) -> str:
    """What a table of byte pairs reaches on the same text: the least that a model has to beat."""
    parts = datasets(config)
    train, validation = (_bytes(parts[split]) for split in ("train", "validation"))
    reached = bigram_loss(train, validation)
    return f"a bigram table of this text has a validation loss of {reached:.2f} nats per byte"


def bigram_loss(train: Bytes, validation: Bytes) -> float:
    """Mean cross-entropy, nats per byte, of the byte-pair frequencies of one text on another.

    Args:
        train: uint8 [rows, length]; every pair is counted once more than it occurs.
        validation: uint8 [rows, length].
    """
    pairs = np.ones((VOCABULARY, VOCABULARY))
    np.add.at(pairs, (train[:, :-1], train[:, 1:]), 1)
    log_probability = np.log(pairs / pairs.sum(axis=1, keepdims=True))
    return -float(log_probability[validation[:, :-1], validation[:, 1:]].mean())


def _bytes(table: pa.Table) -> Bytes:
    column = table["text"].combine_chunks()
    flat: Bytes = column.flatten().to_numpy()
    return flat.reshape(len(column), -1)


def build_model(config: Config) -> nn.Module:
    """The transformer that ``task_args`` describes.

    Raises:
        ConfigError: wrong ``task_args``.
    """
    return ByteGPT(Arguments.of(config))


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Summed cross-entropy in nats, and the number of bytes predicted."""
    text = batch["text"].long()
    scores, target = model(text[:, :-1]), text[:, 1:]
    return F.cross_entropy(scores.flatten(0, 1).float(), target.flatten(), reduction="sum"), target.numel()

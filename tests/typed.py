"""What type checkers and editors make of a user's script. mypy checks this file (`.ci/check`); nothing runs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from typing_extensions import assert_type

import streamshard
from streamshard import StreamShard
from streamshard.checkpoint.disk_layout import Difference
from streamshard.tools.plan import Plan


class Model(nn.Module):
    """A model with a method of its own."""

    depth: int

    def generate(self, tokens: int) -> list[int]:
        return list(range(tokens))


def two_names(model: Model) -> None:
    """`model` keeps its type, and `sharded`, which is the same object, has StreamShard's methods."""
    sharded = StreamShard(model)
    with sharded.no_sync():
        assert_type(model.generate(model.depth), list[int])
    assert_type(model, Model)
    assert_type(sharded.clip_grad_norm_(1.0), torch.Tensor)


def one_name(model: Model) -> None:
    """The result has any attribute. Python has no type that is a StreamShard and a Model."""
    sharded = StreamShard(model, precision="bf16")
    assert_type(sharded, StreamShard)
    assert_type(sharded.generate(sharded.depth), Any)


def names_of_the_package(model: Model) -> None:
    """Names that are imported when they are used have their types too."""
    assert_type(streamshard.plan(model, 8), Plan)
    assert_type(streamshard.load_safetensors(model, "directory"), Difference)

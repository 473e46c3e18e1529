"""Backwards of passes: where autograd reaches one, which ones a loss was computed from, and one of zeros."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from streamshard.engine.engine import Engine
from streamshard.engine.passes import Pass

__all__ = ["BeginBackward", "backward_of", "passes_of"]

_KEY = "streamshard.pass"  # in a node's metadata


class BeginBackward:
    """Prehook of a graph node: backward begins at the root's outputs. Keeps the pass alive as long as the graph."""

    __slots__ = ("engine", "pass_")

    def __init__(self, engine: Engine, pass_: Pass) -> None:
        self.engine = engine
        self.pass_ = pass_

    def __call__(self, grads: Any) -> None:
        self.engine.begin_backward(self.pass_)

    def watch(self, node: Any) -> None:
        """Be called before `node` runs; `passes_of` finds it there."""
        node.register_prehook(self)
        node.metadata[_KEY] = self


def backward_of(engine: Engine, pass_: Pass) -> None:
    """A backward through `pass_` in which no parameter gets a gradient: its collectives, with zeros."""
    loss = torch.zeros((), requires_grad=True) * 1.0
    assert loss.grad_fn is not None
    loss.grad_fn.register_prehook(BeginBackward(engine, pass_))
    loss.backward()


def passes_of(tensors: Iterable[torch.Tensor], engine: Engine) -> list[Pass]:
    """Passes of `engine` from whose outputs `tensors` were computed."""
    found: dict[Pass, None] = {}
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        begins = node.metadata.get(_KEY)
        if begins is None:
            waiting.extend(next_node for next_node, _ in node.next_functions)
        elif begins.engine is engine:
            found[begins.pass_] = None
    return list(found)

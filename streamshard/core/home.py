"""Where a unit's weights come from and its gradients go, if all-gathers do not read main weights on the device.

home                      fetch                             after the reductions
host memory               copies this rank's shard          `end_reduction` copies the results to the host
shards of all replicas    gathers them over replicas        `OverReplicas.add` reduces the results over replicas
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from streamshard.core.params import FlatParam, Param
from streamshard.core.slots import GradSlot, WeightSlot


class HomeUnit(Protocol):
    """A unit with a home: a `streamshard.core.unit.Unit`."""

    index: int
    name: str
    weight_slot: WeightSlot
    flat_params: tuple[FlatParam, ...]
    trained: list[FlatParam]
    params: list[Param]
    versions_sent: list[int]
    home: Home | None

    @property
    def grad_slot(self) -> GradSlot:
        """Its gradients are copied there."""

    def make_main_grads(self) -> None:
        """Give main grads memory."""

    def versions(self) -> list[int]:
        """See `streamshard.core.unit.Unit.versions`."""

    def expire_stepped(self, params: Collection[Param]) -> None:
        """A late step of `params` is due."""


class Home(Protocol):
    """Fetches weights, and receives gradients: a `HostState`, or the `OuterShards` of a 2-D mesh.

    Attributes:
        is_on_host: main weights and main grads lie in host memory.
    """

    is_on_host: bool

    def fetch(self, unit: HomeUnit) -> None:
        """Put this rank's part of the weights, if they have changed, where all-gathers read it. Comm waits for it.

        Notes the weights' versions in `unit.versions_sent`.
        """

    def begin_reduction(self, unit: HomeUnit, *, adds: bool) -> tuple[list[torch.Tensor], bool]:
        """The unit's reductions start next.

        Args:
            unit: its gradients are written.
            adds: main grads hold gradients, to which these are added.

        Returns:
            Where each flat parameter that trains is reduced to, and whether these reductions add to what is there.
        """

    def end_reduction(self, unit: HomeUnit, buffers: Sequence[torch.Tensor]) -> None:
        """The reductions into `buffers` have started."""

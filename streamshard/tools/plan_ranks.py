"""What fits a budget, by the number of ranks: plain, with layers checkpointed, and with state in host memory too."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from streamshard.config import parse_bytes
from streamshard.planning.discovery import ResidentArgument, UnitsArgument
from streamshard.tools.activations import Activations, Build
from streamshard.tools.fit import NO_TOKENS, Room, Stage, choose
from streamshard.tools.planner import BuildOnMesh, Ranks, planning

_DOUBLINGS = 7  # from one rank to 64
_PLAIN, _CHECKPOINTED, _OFFLOADED = "plain", "checkpointed", "offload, checkpointed"


@dataclasses.dataclass(frozen=True)
class Taken:
    """A choice that fits.

    Attributes:
        stage: the name of the stage that sends least.
        device_bytes, host_bytes: of a rank: the engine, the optimizer and activations; 0 in host memory without
            ``offload``.
    """

    stage: str
    device_bytes: int
    host_bytes: int


@dataclasses.dataclass(frozen=True)
class RanksTable:
    """The result of `plan_ranks`. Printable.

    Attributes:
        model, numel: the name of the model's class, and the elements of its parameters.
        budget_bytes, margin_bytes: memory of a rank, and the part of it that stays free.
        activation_bytes: None: not known.
        activations_unknown: why they are not known; "" if they are.
        rows: by number of ranks and kind of run, the choice that fits; None: nothing does.
    """

    model: str
    numel: int
    budget_bytes: int
    margin_bytes: int
    activation_bytes: Activations | None
    activations_unknown: str
    rows: Mapping[int, Mapping[str, Taken | None]]

    @property
    def fits(self) -> bool:
        """Whether anything fits."""
        return any(taken for row in self.rows.values() for taken in row.values())

    def __str__(self) -> str:
        lines = [f"activations are not counted: {self.activations_unknown}"] * (self.activation_bytes is None)
        budget, margin = (f"{n_bytes / 2**30:.2f} GiB" for n_bytes in (self.budget_bytes, self.margin_bytes))
        lines.append(f"{self.model}: {self.numel:,} parameters; of {budget} per rank, {margin} stay free")
        cells = [["ranks, GiB of each", *next(iter(self.rows.values()))]]
        for count, row in self.rows.items():
            cells.append([str(count), *map(_cell, row.values())])
        return "\n".join([*lines, "", *("".join(f"{cell:<24}" for cell in row).rstrip() for row in cells)])


def _cell(taken: Taken | None) -> str:
    if taken is None:
        return "-"
    on_host = f" + host {taken.host_bytes / 2**30:.1f}" if taken.host_bytes else ""
    return f"{taken.stage} {taken.device_bytes / 2**30:.1f}{on_host}"


def plan_ranks(
    model: nn.Module | Build | BuildOnMesh,
    units: UnitsArgument,
    resident: ResidentArgument,
    ranks: Ranks,
    budget: int | str,
    tokens: tuple[int, int] | None,
    given: Mapping[str, Any],
    accumulate: int | None = None,
) -> RanksTable:
    """What fits `budget` on 1, 2, 4, .. times as many ranks as `ranks`. For the other arguments see `plan`."""
    budget_bytes = parse_bytes("budget", budget)
    with planning(model, ranks, units, resident, given, accumulate) as planner:
        activations, unknown = (None, NO_TOKENS) if tokens is None else planner.activations(tokens)
        room = Room.of(budget_bytes, activations, ranks.communicators)
        rows: dict[int, dict[str, Taken | None]] = {}
        for count in (ranks.world_size << doubling for doubling in range(_DOUBLINGS)):
            each = planner.on_ranks(count)
            stages, offloaded = each.stages(), each.offloaded()
            row = {kind: _take(stages, room, kind) for kind in (_PLAIN, _CHECKPOINTED)}
            rows[count] = {**row, _OFFLOADED: _take([offloaded] if offloaded else [], room, _OFFLOADED)}
        numel = sum(unit.count * unit.numel for unit in planner.units())
        sizes = budget_bytes, room.margin_bytes
        return RanksTable(type(planner.model).__name__, numel, *sizes, activations, unknown, rows)


def _take(stages: Sequence[Stage], room: Room, kind: str) -> Taken | None:
    """The stage to take, without or with layers checkpointed."""
    if room.activations is not None:
        known = room.activations.without if kind == _PLAIN else min(room.activations)
        room = dataclasses.replace(room, activations=Activations(known, known))
    choice = choose(stages, room).choice
    stage = next((stage for stage in stages if stage.name == choice), None)
    if stage is None:
        return None
    return Taken(stage.name, stage.total_bytes + min(room.activations or (0,)), stage.host_total_bytes)

"""An optimizer's step that is carried out later, unit by unit, on state that lies in host memory.

`optimizer.step()` copies the options of its groups and returns. The next forward steps each unit right before it
fetches the unit's weights: main weights, main grads and state of a chunk are copied to the device, the optimizer's own
class steps them there, and weights and state are copied back. So an update has the same bits as without `offload`, and
nearly all of it overlaps with compute.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.comm.streams import Collective, StreamName
from streamshard.core.host import HostState, HostUnit
from streamshard.core.params import FlatParam, Param
from streamshard.errors import ShardingError
from streamshard.guards.sharded_parameter import ShardedParameter, own_attributes, refuse_unreduced
from streamshard.nested import map_tensors
from streamshard.planning.structure import replacing
from streamshard.torch_private import NO_STEP_HOOKS, AsTensors, get_grad

# Elements of a chunk, over which an optimizer's kernels run at once. Adam moves 16 bytes of each to the device.
CHUNK_NUMEL = 1 << 24

NUMBERS = ("step", "mu_product", "eta", "mu")  # state with these names is a counter, even if the parameter is a scalar

# Attributes that a stand-in has of its own. The hooks have run around the user's `step()`.
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_REPLACED = ("param_groups", "state", *_HOOKS)


def chunk_bytes(units: Iterable[HostUnit]) -> int:
    """Device bytes of both chunks when Adam steps `units`: all that a chunk of the largest unit copies."""
    largest = 0
    for unit in units:
        numels = [flat.layout.shard_numel for flat in unit.trained]
        kinds = [flat.kind for flat in unit.trained]
        each = [16 + kind.wire_dtype.itemsize * (kind.wire_dtype is not kind.main_dtype) for kind in kinds]
        all_bytes = sum(numel * n_bytes for numel, n_bytes in zip(numels, each, strict=True))
        largest = max(largest, min(all_bytes, CHUNK_NUMEL * max(each, default=0)))
    return 2 * largest


class _Entry(NamedTuple):
    """A parameter of a step.

    Attributes:
        flat, param: where it lies.
        group: its number.
        attributes: of the parameter, which the user has set.
        state: of the optimizer, the dict that was there at the call. The user may have put another one there since.
        counts_on_device: kernels read counters there.
        factors: of its gradient, which clipping has left.
    """

    flat: FlatParam
    param: Param
    group: int
    attributes: dict[str, Any]
    state: dict[str, Any]
    counts_on_device: bool
    factors: Sequence[torch.Tensor]


class _Part(NamedTuple):
    """Some of a parameter's elements on this rank."""

    entry: _Entry
    start: int
    stop: int

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        """These elements of `shard` [shard_numel], an alias with a version counter of its own."""
        offset = self.entry.param.local.shard_offset
        return shard.data[offset + self.start : offset + self.stop]


class LateStep:
    """One ``optimizer.step()`` for the parameters of one model in host memory.

    Args:
        optimizer: works element by element. Its state gets host tensors. Its step has not begun.
        params: its parameters with a gradient, each with its unit's index, flat parameter and group.
        host: of the model. It keeps this object, which must not keep it.

    Attributes:
        makes_state: it steps a parameter for the first time.
    """

    def __init__(
        self, optimizer: Optimizer, params: Sequence[tuple[int, FlatParam, Param, int]], host: HostState
    ) -> None:
        self._kind = type(optimizer)
        self._attributes = _copied({k: v for k, v in vars(optimizer).items() if k not in _REPLACED}, host.copy_of)
        self._options = [map_tensors({**group, "params": []}, host.copy_of) for group in optimizer.param_groups]
        # Kernels of such groups read counters on the device.
        counts_there = [bool(group.get("fused") or group.get("capturable")) for group in optimizer.param_groups]
        self._entries: dict[int, list[_Entry]] = defaultdict(list)
        self.makes_state = False
        for unit, flat, param, group in params:
            if param.local.numel:
                self.makes_state = self.makes_state or param.sharded not in optimizer.state
                state = optimizer.state.setdefault(param.sharded, {})
                facts = flat, param, group, _copied(own_attributes(param.sharded), host.copy_of), state
                self._entries[unit].append(_Entry(*facts, counts_there[group], host.grads.factors_of(param)))

    @property
    def is_done(self) -> bool:
        """Whether all units are stepped."""
        return not self._entries

    def params_of(self, unit: int) -> list[Param]:
        """The parameters of the unit with this index that are still to be stepped."""
        return [entry.param for entry in self._entries.get(unit, ())]

    def run(self, host: HostState, unit: int, *, fills_slot: bool) -> None:
        """Step one unit.

        Args:
            host: of the model.
            unit: its index. FETCH has waited for its memory.
            fills_slot: copy the new weights to the weight slot too. Else only to the all-gather input on the host.
        """
        after: dict[str, Any] = {}
        for parts in _chunks(self._entries.pop(unit, ())):
            with host.chunk() as tensors:
                chunk = _Chunk(host, tensors, parts, after)
                step = functools.partial(chunk.step, self._stand_in, fills_slot=fills_slot)
                host.launch(StreamName.FETCH, Collective.STEP, step, *chunk.touched(fills_slot=fills_slot))
                host.stepped()
                host.launch(StreamName.STORE, Collective.COPY, chunk.store, (), chunk.stored())
        host.stored(unit)

    def _stand_in(self, groups: Mapping[int, list[nn.Parameter]], state: dict[nn.Parameter, dict[str, Any]]) -> None:
        """Step plain parameters on the device, as an optimizer of the same class with the same options."""
        kind: Any = self._kind
        options = [map_tensors(each, torch.clone) for each in self._options]
        stand_in = object.__new__(kind)
        stand_in.__dict__ = {
            **_copied(self._attributes),
            **dict.fromkeys(_HOOKS, {}),
            "param_groups": [{**each, "params": groups.get(number, [])} for number, each in enumerate(options)],
            "state": defaultdict(dict, state),
        }
        with replacing(*NO_STEP_HOOKS):  # for a class whose step calls super().step()
            kind.step.__wrapped__(stand_in)
        state.update(stand_in.state)


class _Chunk:
    """One part of a step: copied to the device, stepped, copied back.

    Args:
        host: of the model.
        tensors: keeps the chunk's memory.
        parts: of parameters.
        after: state after the step, of a parameter that the chunk before has begun; filled here.
    """

    def __init__(
        self, host: HostState, tensors: list[torch.Tensor], parts: Sequence[_Part], after: dict[str, Any]
    ) -> None:
        self._host, self._tensors, self._parts, self._after = host, tensors, parts, after
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # on the host, on the device

    def touched(self, *, fills_slot: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What `step` reads and writes outside of the chunk."""
        flats = [(part, part.entry.flat) for part in self._parts]
        read = [part.of(shard) for part, flat in flats for shard in (flat.main, flat.main_grads)]
        return read, [part.of(flat.gather.shard) for part, flat in flats] if fills_slot else []

    def stored(self) -> list[torch.Tensor]:
        """What `store` writes."""
        return [part.of(shard) for part in self._parts for shard in (part.entry.flat.main, part.entry.flat.host_input)]

    def step(self, run: Callable[..., None], *, fills_slot: bool) -> None:
        """Copy the parts to the device, and step them. FETCH."""
        groups: dict[int, list[nn.Parameter]] = defaultdict(list)
        state: dict[nn.Parameter, dict[str, Any]] = {}
        params = []
        for part in self._parts:
            param = nn.Parameter(self._fetch(part.of(part.entry.flat.main)))
            param.__dict__.update(part.entry.attributes)
            param.grad = self._fetch(part.of(part.entry.flat.main_grads))
            for factor in part.entry.factors:
                param.grad.mul_(factor)
            state[param] = {key: self._fetch_state(key, part, value) for key, value in part.entry.state.items()}
            groups[part.entry.group].append(param)
            params.append(param)
        run(groups, state)
        for part, param in zip(self._parts, params, strict=True):
            flat, weights = part.entry.flat, param.detach()
            sent = weights.to(flat.kind.wire_dtype)
            if fills_slot:
                part.of(flat.gather.shard).copy_(sent)
            self._pairs.append((part.of(flat.main), weights))
            if flat.host_input is not flat.main:
                self._pairs.append((part.of(flat.host_input), sent))
            for key, value in state[param].items():
                self._after[key] = self._keep_state(key, part, value)
            if part.stop == part.entry.param.local.numel:
                part.entry.state.clear()
                part.entry.state.update(self._after)
                self._after.clear()
        self._tensors += [source for _, source in self._pairs]

    def store(self) -> None:
        """Copy weights and state back. STORE."""
        for to, source in self._pairs:
            to.copy_(source, non_blocking=True)

    def _fetch(self, source: torch.Tensor) -> torch.Tensor:
        """A copy on the device."""
        copy = torch.empty_like(source, device=self._host.device).copy_(source, non_blocking=True)
        self._tensors.append(copy)
        return copy

    def _fetch_state(self, key: str, part: _Part, value: Any) -> Any:
        """The part's elements of one entry of state, on the device; a copy of a counter."""
        if not isinstance(value, torch.Tensor):
            return value
        if _is_number(key, part, value):
            is_last = part.stop == part.entry.param.local.numel  # it changes the counter itself, as without offload
            device = self._host.device if part.entry.counts_on_device else value.device
            return value.to(device, copy=not is_last)
        return self._fetch(value.view(-1)[part.start : part.stop])

    def _keep_state(self, key: str, part: _Part, value: Any) -> Any:
        """The entry of state that the parameter has after the step: host memory, to which `value` will be copied."""
        if not isinstance(value, torch.Tensor) or _is_number(key, part, value):
            return value
        kept = self._after.get(key)
        if kept is None:
            param = part.entry.param
            kept = self._host.home_of(part.entry.state.get(key), param.local.numel, value.dtype)
            kept = kept.view(param.piece.local_shape)
        self._pairs.append((kept.view(-1)[part.start : part.stop], value))
        return kept


def _chunks(entries: Sequence[_Entry]) -> Iterator[list[_Part]]:
    """Cut parameters into chunks."""
    parts: list[_Part] = []
    room = CHUNK_NUMEL
    for entry in entries:
        start = 0
        while start < entry.param.local.numel:
            stop = min(entry.param.local.numel, start + room)
            parts.append(_Part(entry, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield parts
                parts, room = [], CHUNK_NUMEL
    if parts:
        yield parts


def _is_number(key: str, part: _Part, value: torch.Tensor) -> bool:
    """Whether an entry of state is a counter. A parameter that is a scalar has moments that look like one."""
    return value.ndim == 0 and (key in NUMBERS or part.entry.param.piece.local_shape != ())


def _copied(values: dict[str, Any], copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> dict[str, Any]:
    """Options or attributes, which a step may change in place."""
    return {key: copy(value) if isinstance(value, torch.Tensor) else value for key, value in values.items()}


def late_steps(
    optimizer: Optimizer, on_host: Sequence[ShardedParameter]
) -> list[tuple[HostState, LateStep, dict[HostUnit, list[Param]]]]:
    """By model, the step of its parameters that have a gradient, and these by unit."""
    refuse_unreduced(on_host, "an optimizer's step")
    hosts = {param: host for param in on_host if (host := host_of(param)) is not None}
    found: dict[HostState, list[tuple[HostUnit, FlatParam, Param, int]]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            place = hosts[param].find(param) if param in hosts else None
            with AsTensors():
                if place is not None and get_grad(param) is not None:
                    place[2].adopt_grad()
                    found.setdefault(hosts[param], []).append((*place, number))
    late = []
    for host, places in found.items():
        by_unit: dict[HostUnit, list[Param]] = defaultdict(list)
        for unit, _, each, _ in places:
            by_unit[unit].append(each)
        indexed = [(unit.index, flat, each, group) for unit, flat, each, group in places]
        late.append((host, LateStep(optimizer, indexed, host), by_unit))
    return late


def host_of(param: torch.Tensor) -> HostState | None:
    """The host memory in which the state of `param` lies; None: it lies on the device, or the model is gone.

    Raises:
        ShardingError: the model has taken a late step with it.
    """
    if not isinstance(param, ShardedParameter):
        return None
    if param.why_unusable:
        raise ShardingError(f"an optimizer's state or step: {param.piece.what} {param.why_unusable}")
    host: HostState | None = param.piece.host
    return host

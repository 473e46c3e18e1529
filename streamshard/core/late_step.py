"""An optimizer's step that is carried out later, unit by unit, on state that lies in host memory.

`optimizer.step()` copies the options of its groups and returns. The next forward steps each unit right before it
fetches the unit's weights: main weights, main grads and state of a chunk are copied to the device, the optimizer's own
class steps them there, and weights and state are copied back. So an update has the same bits as without `offload`, and
nearly all of it overlaps with compute.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.comm.streams import Collective, StreamName
from streamshard.core.host import HostState
from streamshard.core.params import FlatParam, Param
from streamshard.core.ranges import GAP_NUMEL, Copy, Range, cut, joined
from streamshard.core.unit import Unit
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


def chunk_bytes(units: Iterable[Unit]) -> int:
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
        after: its state after the step; complete behind its last part.
    """

    flat: FlatParam
    param: Param
    group: int
    attributes: dict[str, Any]
    state: dict[str, Any]
    counts_on_device: bool
    factors: Sequence[torch.Tensor]
    after: dict[str, Any]


class _Part(NamedTuple):
    """Some of a parameter's elements on this rank."""

    entry: _Entry
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """Whether the parameter has no elements behind it."""
        return self.stop == self.entry.param.local.numel

    def of(self, shard: torch.Tensor) -> Range:
        """These elements of `shard` [shard_numel]."""
        return Range(shard, self.entry.param.local.shard_offset + self.start, self.stop - self.start)


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
                self._entries[unit].append(_Entry(*facts, counts_there[group], host.grads.factors_of(param), {}))
        for entries in self._entries.values():
            entries.sort(key=lambda entry: (entry.flat.tag, entry.param.local.shard_offset))
        self._surroundings = _surroundings(host.device)

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
        for parts in _chunks(self._entries.pop(unit, ())):
            with host.chunk() as tensors:
                chunk = _Chunk(host, tensors, parts)
                step = functools.partial(self._step, chunk, host.device, fills_slot=fills_slot)
                host.launch(StreamName.FETCH, Collective.STEP, step, *chunk.touched(fills_slot=fills_slot))
                host.stepped()
                host.launch(StreamName.STORE, Collective.COPY, chunk.store, (), chunk.stored())
        host.stored(unit)

    def _step(self, chunk: _Chunk, device: torch.device, *, fills_slot: bool) -> None:
        with _inside(self._surroundings, device):
            chunk.step(self._stand_in, fills_slot=fills_slot)

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

    Of each kind (main weights, main grads, an entry of state) there is one buffer, in which parameters lie as in the
    shard. So a copy takes all parameters at once.

    Args:
        host: of the model.
        tensors: keeps the chunk's memory.
        parts: of parameters, in the order of their memory.
    """

    def __init__(self, host: HostState, tensors: list[torch.Tensor], parts: Sequence[_Part]) -> None:
        self._host, self._tensors, self._parts = host, tensors, parts
        self._stores: dict[Any, list[Copy]] = defaultdict(list)  # by kind
        self._places: list[tuple[int, int]] = []  # of each part in a buffer: where it begins, its length
        self._numel = 0
        before: Range | None = None
        for part in parts:
            place = part.of(part.entry.flat.main)
            distance = None if before is None else before.distance(place)
            gap = GAP_NUMEL + 1 if before is None or distance is None else distance - before.numel
            if gap > GAP_NUMEL:
                gap = -self._numel % GAP_NUMEL
            begin = self._numel + gap
            self._places.append((begin, place.numel))
            self._numel, before = begin + place.numel, place

    def _views(self, kind: Callable[[FlatParam], torch.Tensor]) -> list[torch.Tensor]:
        """The parts of one kind of shard."""
        ranges = [part.of(kind(part.entry.flat)) for part in self._parts]
        return [view for view, _ in joined(zip(ranges, ranges, strict=True))]

    def touched(self, *, fills_slot: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What `step` reads and writes outside of the chunk."""
        read = self._views(lambda flat: flat.main) + self._views(lambda flat: flat.main_grads)
        return read, self._views(lambda flat: flat.gather.shard) if fills_slot else []

    def stored(self) -> list[torch.Tensor]:
        """What `store` writes."""
        return self._views(lambda flat: flat.main) + self._views(lambda flat: flat.host_input)

    def step(self, run: Callable[..., None], *, fills_slot: bool) -> None:
        """Copy the parts to the device, and step them. FETCH."""
        main = self._fetch({n: part.of(part.entry.flat.main) for n, part in enumerate(self._parts)})
        grads = self._fetch({n: part.of(part.entry.flat.main_grads) for n, part in enumerate(self._parts)})
        weights = cut(main, self._places)
        params = [nn.Parameter(each) for each in weights]
        groups: dict[int, list[nn.Parameter]] = defaultdict(list)
        for part, param, grad in zip(self._parts, params, cut(grads, self._places), strict=True):
            param.__dict__.update(part.entry.attributes)
            param.grad = grad
            groups[part.entry.group].append(param)
            for factor in part.entry.factors:
                grad.mul_(factor)
        state = dict(zip(params, self._fetch_state(), strict=True))
        run(groups, state)
        for param, each in zip(params, weights, strict=True):
            if param.data_ptr() != each.data_ptr():  # ``param.data = ..``
                each.copy_(param)
        self._send(main, fills_slot=fills_slot)
        self._keep_state(list(state.values()))
        self._tensors += [source.tensor for copies in self._stores.values() for _, source in copies]

    def _fetch(self, sources: Mapping[int, Range]) -> torch.Tensor:
        """A buffer of the device with the `sources`, by part."""
        dtype = next(iter(sources.values())).tensor.dtype
        buffer = torch.empty(self._numel, dtype=dtype, device=self._host.device)
        self._tensors.append(buffer)
        copies = [(Range(buffer, *self._places[number]), source) for number, source in sources.items()]
        for to, source in joined(copies):
            to.copy_(source, non_blocking=True)
        return buffer

    def _fetch_state(self) -> list[dict[str, Any]]:
        """The state of each part on the device."""
        states = [dict(part.entry.state) for part in self._parts]
        sources: dict[tuple[str, torch.dtype], dict[int, Range]] = defaultdict(dict)
        for number, part in enumerate(self._parts):
            for key, value in part.entry.state.items():
                if not isinstance(value, torch.Tensor):
                    continue
                if _is_number(key, part, value):
                    # The last part's step changes the counter itself, as without offload.
                    device = self._host.device if part.entry.counts_on_device else value.device
                    states[number][key] = value.to(device, copy=not part.is_last)
                else:
                    sources[key, value.dtype][number] = Range(value.contiguous(), part.start, part.stop - part.start)
        for (key, _), each in sources.items():
            values = cut(self._fetch(each), [self._places[number] for number in each])
            for number, value in zip(each, values, strict=True):
                states[number][key] = value
        return states

    def _send(self, main: torch.Tensor, *, fills_slot: bool) -> None:
        """Cast new weights for the all-gather, and note where they are to be stored."""
        sent = {dtype: main.to(dtype) for dtype in {part.entry.flat.kind.wire_dtype for part in self._parts}}
        to_slot = []
        for place, part in zip(self._places, self._parts, strict=True):
            flat = part.entry.flat
            new = Range(sent[flat.kind.wire_dtype], *place)
            self._stores["main weights"].append((part.of(flat.main), Range(main, *place)))
            if flat.host_input is not flat.main:
                self._stores["all-gather input"].append((part.of(flat.host_input), new))
            to_slot.append((part.of(flat.gather.shard), new))
        for to, source in joined(to_slot if fills_slot else ()):
            to.copy_(source)

    def _keep_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Take over the state of each part after the step, and note where it is to be stored."""
        values: dict[tuple[str, torch.dtype], dict[int, torch.Tensor]] = defaultdict(dict)
        for number, (part, state) in enumerate(zip(self._parts, states, strict=True)):
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and not _is_number(key, part, value):
                    values[key, value.dtype][number] = value.contiguous()
                    part.entry.after.setdefault(key, None)  # keeps the order of keys
                else:
                    part.entry.after[key] = value
        for (key, dtype), each in values.items():
            self._find_homes(key, dtype, each)
            for number, value in each.items():
                entry, start, stop = self._parts[number]
                self._stores[key, dtype].append(
                    (Range(entry.after[key], start, stop - start), Range(value, 0, stop - start))
                )
        for entry, _, _ in (part for part in self._parts if part.is_last):
            entry.state.clear()
            entry.state.update(entry.after)

    def _find_homes(self, key: str, dtype: torch.dtype, numbers: Iterable[int]) -> None:
        """Host memory for one entry of the parts' state. Parts that follow each other get new memory in one piece."""
        runs: list[list[int]] = []
        for number in numbers:
            entry = self._parts[number].entry
            if entry.after[key] is None:  # else the chunk before has begun the parameter
                entry.after[key] = self._host.home_of(entry.state.get(key))
            if entry.after[key] is None:
                if not runs or runs[-1][-1] != number - 1:
                    runs.append([])
                runs[-1].append(number)
        for run in runs:
            begin, end = self._places[run[0]][0], self._places[run[-1]][0]
            home = self._host.allocate(end - begin + self._parts[run[-1]].entry.param.local.numel, dtype)
            for number in run:
                entry, at = self._parts[number].entry, self._places[number][0] - begin
                entry.after[key] = home[at : at + entry.param.local.numel].view(entry.param.piece.local_shape)

    def store(self) -> None:
        """Copy weights and state back. STORE."""
        for copies in self._stores.values():
            for to, source in joined(copies):
                to.copy_(source, non_blocking=True)


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


def _surroundings(device: torch.device) -> tuple[Any, ...]:
    """The settings of torch by which operators compute and make tensors."""
    autocasts = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in {device.type, "cpu"}
    ]
    return torch.is_inference_mode_enabled(), torch.get_default_dtype(), torch.get_default_device(), autocasts


@contextlib.contextmanager
def _inside(wanted: tuple[Any, ...], device: torch.device) -> Iterator[None]:
    """Run the body in these `_surroundings`, whatever forward or reader is around it."""
    if (now := _surroundings(device)) == wanted:
        yield
        return
    is_inference, dtype, default_device, autocasts = wanted
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_default_dtype, now[1])
        torch.set_default_dtype(dtype)
        contexts = (torch.autocast(kind, cast_dtype, is_enabled) for kind, is_enabled, cast_dtype in autocasts)
        for each in (torch.inference_mode(is_inference), torch.no_grad(), default_device, *contexts):
            stack.enter_context(each)
        yield


def late_steps(
    optimizer: Optimizer, on_host: Sequence[ShardedParameter]
) -> list[tuple[HostState, LateStep, dict[Unit, list[Param]]]]:
    """By model, the step of its parameters that have a gradient, and these by unit."""
    refuse_unreduced(on_host, "an optimizer's step")
    hosts = {param: host for param in on_host if (host := host_of(param)) is not None}
    found: dict[HostState, list[tuple[Unit, FlatParam, Param, int]]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            place = hosts[param].find(param) if param in hosts else None
            with AsTensors():
                if place is not None and get_grad(param) is not None:
                    place[2].adopt_grad()
                    found.setdefault(hosts[param], []).append((*place, number))
    late = []
    for host, places in found.items():
        by_unit: dict[Unit, list[Param]] = defaultdict(list)
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

"""An optimizer's step that is carried out later, unit by unit, on state that lies in host memory.

`optimizer.step()` copies the options of its groups and returns, unless it makes state. The next forward steps each unit
right before it fetches the unit's weights: main weights, main grads and state of a chunk are copied to the device, the
optimizer's own class steps them there, and weights and state are copied back. So an update has the same bits as without
`offload`, and nearly all of it overlaps with compute.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.comm.streams import Collective, StreamName
from streamshard.core.host import HostState
from streamshard.core.host_grads import cut
from streamshard.core.params import FlatParam, Param
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
    """Device bytes of both chunks when Adam steps `units`: all that a chunk of the largest flat parameter copies."""
    largest = 0
    for flat in (flat for unit in units for flat in unit.trained):
        # Main weights, main grads and Adam's two moments in fp32, and the weights as they are sent.
        each = 16 + flat.kind.wire_dtype.itemsize * (flat.kind.wire_dtype is not flat.kind.main_dtype)
        largest = max(largest, each * min(flat.layout.shard_numel, CHUNK_NUMEL))
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
    factors: Sequence[torch.Tensor] = ()

    @property
    def start(self) -> int:
        """Where it begins in the shard."""
        return self.param.local.shard_offset

    @property
    def stop(self) -> int:
        """Where it ends in the shard."""
        return self.param.local.shard_offset + self.param.local.numel


class _Part(NamedTuple):
    """Some of a parameter's elements on this rank: a range of the shard."""

    entry: _Entry
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """Whether the parameter has no elements behind it."""
        return self.stop == self.entry.stop


_Kind = tuple[str, torch.dtype]  # of moments: their key in the optimizer's state, and their dtype


class _Moments:
    """The moments of one optimizer in one flat parameter: of each kind a buffer in pinned memory.

    A buffer covers the range of the shard in which the optimizer has stepped parameters, so a chunk of moments is one
    copy. Entries of the optimizer's state are views of it.

    Attributes:
        start, stop: the range.
        buffers: by kind [stop - start].
    """

    def __init__(self) -> None:
        self.start = self.stop = 0
        self.buffers: dict[_Kind, torch.Tensor] = {}

    def take(self, entries: Sequence[_Entry], host: HostState) -> None:
        """`entries`, in the order of their memory, are about to be stepped. Move to buffers what lies elsewhere."""
        start, stop = entries[0].start, max(entry.stop for entry in entries)
        if self.stop:
            start, stop = min(start, self.start), max(stop, self.stop)
        if (start, stop) != (self.start, self.stop):
            if self.buffers:
                host.settle()  # earlier steps use them
            self.start, self.stop, self.buffers = start, stop, {}
        for entry in entries:
            for key, value in entry.state.items():
                if is_moment(key, entry.param, value):
                    home = self.place_of(entry, key, value.dtype, host)
                    if value.data_ptr() != home.data_ptr():  # the user has loaded it, or the buffer is new
                        host.settle()
                        entry.state[key] = home.copy_(value)

    def place_of(self, entry: _Entry, key: str, dtype: torch.dtype, host: HostState) -> torch.Tensor:
        """[local shape], the place of one entry of the state."""
        if (buffer := self.buffers.get((key, dtype))) is None:
            buffer = self.buffers[key, dtype] = host.allocate(self.stop - self.start, dtype)
        return buffer[entry.start - self.start : entry.stop - self.start].view(entry.param.piece.local_shape)


class LateStep:
    """One ``optimizer.step()`` for the parameters of one model in host memory.

    Args:
        optimizer: works element by element. Its state gets host tensors. Its step has not begun.
        params: its parameters with a gradient, each with its unit, flat parameter and group.
        host: of the model. It keeps this object, which must not keep it.

    Attributes:
        makes_state: it steps a parameter for the first time.
        changed: by unit, its parameters. Whoever adds this step to `host` counts and clears them: units keep `host`.
    """

    def __init__(
        self, optimizer: Optimizer, params: Sequence[tuple[Unit, FlatParam, Param, int]], host: HostState
    ) -> None:
        self._kind = type(optimizer)  # the optimizer itself may go, and `HostState.moments` with it
        self._attributes = _copied({k: v for k, v in vars(optimizer).items() if k not in _REPLACED}, host.copy_of)
        # A scheduler may change them, tensors in place, before the step is carried out.
        self._options = [map_tensors({**group, "params": []}, host.copy_of) for group in optimizer.param_groups]
        # Kernels of such groups read counters on the device.
        counts_there = [bool(group.get("fused") or group.get("capturable")) for group in optimizer.param_groups]
        self.makes_state = False
        self.changed: dict[Unit, list[Param]] = defaultdict(list)
        by_flat: dict[tuple[int, int], list[_Entry]] = defaultdict(list)  # by unit and tag
        for unit, flat, param, group in params:
            self.changed[unit].append(param)  # without elements here too: versions change on all ranks
            if param.local.numel:
                self.makes_state = self.makes_state or param.sharded not in optimizer.state
                state = optimizer.state.setdefault(param.sharded, {})
                attributes = _copied(own_attributes(param.sharded), host.copy_of)
                by_flat[unit.index, flat.tag].append(_Entry(flat, param, group, attributes, state, counts_there[group]))
        moments: dict[int, _Moments] = host.moments.setdefault(optimizer, defaultdict(_Moments))
        for (_, tag), entries in by_flat.items():
            entries.sort(key=operator.attrgetter("start"))  # chunks are ranges of the shard
            moments[tag].take(entries, host)
        self._entries: dict[int, list[tuple[_Moments, list[_Entry]]]] = defaultdict(list)  # by unit
        for index, tag in sorted(by_flat):  # behind `take`, which may apply factors
            entries = [each._replace(factors=host.grads.factors_of(each.param)) for each in by_flat[index, tag]]
            self._entries[index].append((moments[tag], entries))

    @property
    def is_done(self) -> bool:
        """Whether all units are stepped."""
        return not self._entries

    def params_of(self, unit: int) -> list[Param]:
        """The parameters of the unit with this index that are still to be stepped."""
        return [entry.param for _, entries in self._entries.get(unit, ()) for entry in entries]

    def run(self, host: HostState, unit: int, *, fills_slot: bool) -> None:
        """Step one unit.

        Args:
            host: of the model.
            unit: its index. FETCH has waited for its memory.
            fills_slot: copy the new weights to the weight slot too. Else only to the all-gather input on the host.
        """
        for moments, parts in _chunks(self._entries.pop(unit, ())):
            with host.chunk() as tensors:
                chunk = _Chunk(host, tensors, moments, parts)
                step = functools.partial(self._step, chunk, host.device, fills_slot=fills_slot)
                host.launch(StreamName.FETCH, Collective.STEP, step, *chunk.touched(fills_slot=fills_slot))
                host.stepped()
                host.launch(StreamName.STORE, Collective.COPY, chunk.store, (), chunk.stored())

    def _step(self, chunk: _Chunk, device: torch.device, *, fills_slot: bool) -> None:
        with _plain_torch(device):
            chunk.step(self._stand_in, fills_slot=fills_slot)

    def _stand_in(self, groups: Mapping[int, list[nn.Parameter]], state: dict[nn.Parameter, dict[str, Any]]) -> None:
        """Step plain parameters on the device, as an optimizer of the same class with the same options."""
        kind: Any = self._kind
        # For each chunk: a step may change them in place.
        options = [map_tensors(each, torch.clone) for each in self._options]
        # A constructor would want arguments that nobody has kept.
        stand_in = object.__new__(kind)
        stand_in.__dict__ = {
            **_copied(self._attributes),
            **dict.fromkeys(_HOOKS, {}),
            # Empty groups stay: some optimizers find settings by a group's place.
            "param_groups": [{**each, "params": groups.get(number, [])} for number, each in enumerate(options)],
            "state": defaultdict(dict, state),
        }
        with replacing(*NO_STEP_HOOKS):  # for a class whose step calls super().step()
            kind.step(stand_in)
        state.update(stand_in.state)


class _Chunk:
    """A range of a shard: copied to the device, stepped, copied back.

    One copy each takes main weights, main grads, and moments. Parameters in it that are not stepped are copied too, and
    back as they were.

    Args:
        host: of the model.
        tensors: keeps the chunk's memory.
        moments: of the flat parameter.
        parts: of its parameters, in the order of their memory.
    """

    def __init__(self, host: HostState, tensors: list[torch.Tensor], moments: _Moments, parts: Sequence[_Part]) -> None:
        self._host, self._tensors, self._moments, self._parts = host, tensors, moments, parts
        self._flat, self._start = parts[0].entry.flat, parts[0].start
        self._numel = parts[-1].stop - self._start
        self._places = [(part.start - self._start, part.stop - part.start) for part in parts]
        self._stores: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _of(self, shard: torch.Tensor, start: int = 0) -> torch.Tensor:
        """The chunk's range of `shard`, which begins with element `start`; with a version counter of its own."""
        return shard.data.narrow(0, self._start - start, self._numel)

    def touched(self, *, fills_slot: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What `step` reads and writes outside of the chunk."""
        read = [self._of(self._flat.main), self._of(self._flat.main_grads)]
        return read, [self._of(self._flat.gather.shard)] if fills_slot else []

    def stored(self) -> list[torch.Tensor]:
        """What `store` writes."""
        return [self._of(self._flat.main), self._of(self._flat.host_input)]

    def step(self, run: Callable[..., None], *, fills_slot: bool) -> None:
        """Copy the parts to the device, and step them. FETCH."""
        flat = self._flat
        main, grads = self._fetch(self._of(flat.main)), self._fetch(self._of(flat.main_grads))
        moments = {kind: self._fetch(self._of_moments(buffer)) for kind, buffer in self._moments.buffers.items()}
        weights = cut(main, self._places)
        params = [nn.Parameter(each) for each in weights]
        groups: dict[int, list[nn.Parameter]] = defaultdict(list)
        for part, param, grad in zip(self._parts, params, cut(grads, self._places), strict=True):
            param.__dict__.update(part.entry.attributes)
            param.grad = grad
            groups[part.entry.group].append(param)
            # One after the other, as without ``offload``: a product of factors would be rounded in another way.
            for factor in part.entry.factors:
                grad.mul_(factor)
        state = dict(zip(params, self._states(moments), strict=True))
        run(groups, state)
        for param, each in zip(params, weights, strict=True):
            if param.data_ptr() != each.data_ptr():  # ``param.data = ..``
                each.copy_(param)
        self._keep_state(list(state.values()), moments)
        self._stores.append((self._of(flat.main), main))
        sent = main.to(flat.kind.wire_dtype)
        if flat.host_input is not flat.main:
            self._stores.append((self._of(flat.host_input), sent))
        if fills_slot:
            self._of(flat.gather.shard).copy_(sent)
        self._tensors += [source for _, source in self._stores]

    def _of_moments(self, buffer: torch.Tensor) -> torch.Tensor:
        return self._of(buffer, self._moments.start)

    def _fetch(self, source: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(self._numel, dtype=source.dtype, device=self._host.device)
        self._tensors.append(buffer)
        return buffer.copy_(source, non_blocking=True)

    def _states(self, moments: Mapping[_Kind, torch.Tensor]) -> list[dict[str, Any]]:
        """The state of each part on the device."""
        views = {kind: cut(buffer, self._places) for kind, buffer in moments.items()}
        states = []
        for number, part in enumerate(self._parts):
            states.append(state := dict(part.entry.state))  # the dict itself changes with the last part
            for key, value in state.items():
                if is_moment(key, part.entry.param, value):
                    state[key] = views[key, value.dtype][number]
                elif isinstance(value, torch.Tensor):
                    # The last part's step changes the counter itself, as without offload.
                    device = self._host.device if part.entry.counts_on_device else value.device
                    state[key] = value.to(device, copy=not part.is_last)
        return states

    def _keep_state(self, states: Sequence[dict[str, Any]], moments: MutableMapping[_Kind, torch.Tensor]) -> None:
        """Take over the state of each part after the step, and note what is to be stored."""
        for part, (begin, numel), state in zip(self._parts, self._places, states, strict=True):
            for key, value in state.items():
                if not is_moment(key, part.entry.param, value):
                    continue
                if (buffer := moments.get((key, value.dtype))) is None:  # the first step
                    # Zeros: the range may have parameters that no step has reached.
                    buffer = moments[key, value.dtype] = value.new_zeros(self._numel)
                place = buffer[begin : begin + numel]
                if value.data_ptr() != place.data_ptr():
                    place.copy_(value.reshape(-1))
                state[key] = self._moments.place_of(part.entry, key, value.dtype, self._host)
            if part.is_last:
                # In place: the user's optimizer has this dict.
                part.entry.state.clear()
                part.entry.state.update(state)
        buffers = self._moments.buffers
        self._stores += [(self._of_moments(buffers[kind]), buffer) for kind, buffer in moments.items()]

    def store(self) -> None:
        """Copy weights and state back. STORE."""
        for to, source in self._stores:
            to.copy_(source, non_blocking=True)


def _chunks(found: Iterable[tuple[_Moments, Sequence[_Entry]]]) -> Iterator[tuple[_Moments, list[_Part]]]:
    """Cut flat parameters into ranges of at most `CHUNK_NUMEL` elements, which begin and end with a part."""
    for moments, entries in found:
        parts: list[_Part] = []
        for entry in entries:
            start = entry.start
            while start < entry.stop:
                if parts and start - parts[0].start >= CHUNK_NUMEL:
                    yield moments, parts
                    parts = []
                limit = CHUNK_NUMEL + (parts[0].start if parts else start)
                parts.append(_Part(entry, start, min(entry.stop, limit)))
                start = parts[-1].stop
        yield moments, parts


def is_moment(key: str, param: Param, value: object) -> bool:
    """Whether an entry of state has a number for each element. A scalar's moments look like counters."""
    if not isinstance(value, torch.Tensor):
        return False
    return value.ndim > 0 or (key not in NUMBERS and param.piece.local_shape == ())


def _copied(values: dict[str, Any], copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> dict[str, Any]:
    """Options or attributes, which a step may change in place."""
    return {key: copy(value) if isinstance(value, torch.Tensor) else value for key, value in values.items()}


@contextlib.contextmanager
def _plain_torch(device: torch.device) -> Iterator[None]:
    """Run the body outside of inference mode and autocast, whatever forward or reader is around it."""
    on_device, on_host = (torch.autocast(kind, enabled=False) for kind in (device.type, "cpu"))
    with torch.inference_mode(False), torch.no_grad(), on_device, on_host:
        yield


def late_steps(optimizer: Optimizer, on_host: Sequence[ShardedParameter]) -> list[tuple[HostState, LateStep]]:
    """By model, the step of its parameters in `on_host` that have a gradient."""
    refuse_unreduced(on_host, "an optimizer's step")
    found: dict[HostState, list[tuple[Unit, FlatParam, Param, int]]] = defaultdict(list)
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            host = host_of(param)
            place = None if host is None else host.find(param)
            with AsTensors():
                if host is not None and place is not None and (grad := get_grad(param)) is not None:
                    place[2].adopt_grad(grad)  # a chunk copies main grads, not what the user has put into `.grad`
                    found[host].append((*place, number))
    return [(host, LateStep(optimizer, places, host)) for host, places in found.items()]


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

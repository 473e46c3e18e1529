"""State in host memory (``offload="state"``): copies between it and the device, on two streams of their own.

    host: all-gather input -fetch-> this rank's range of the weight slot -all-gather-> weight slot
    gradient slot -reduction-> staging -store-> host: main grads
    host: main weights, main grads, optimizer state -fetch-> chunk -step-> chunk -store-> host

Slots, program, reductions and the meaning of ``.grad`` are those of a model without `offload`. FETCH copies to the
device, STORE to the host. An optimizer's step is late: the next forward carries it out, unit by unit, right before it
fetches the unit (`streamshard.core.late_step`). So whoever reads or writes host memory calls `HostState.settle` first.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.comm.communicator import Communicator
from streamshard.comm.streams import Collective, Fence, Rule, StepPart, StreamName
from streamshard.core.host_grads import HostGrads
from streamshard.core.params import FlatParam, Param
from streamshard.core.slots import Ledger
from streamshard.core.unit import Unit
from streamshard.errors import ShardingError, describe
from streamshard.guards.sharded_parameter import ShardedParameter
from streamshard.guards.sharded_tensor import Life
from streamshard.pinned import PinnedMemory
from streamshard.planning.layout import UnitLayout
from streamshard.planning.memory import Category

_COPY_BYTES = 1 << 27  # the device's copy engines take one copy after the other, so no copy may be long
_Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class HostState:
    """The copies of one model. Owns their fences and buffers.

    Args:
        layouts: of all units.
        on_host: by unit, whether its state lies in host memory.
        ranks: the shard group.
        ledger: allocates.

    Attributes:
        device: the accelerator.
        grads: knows norms and factors of main grads, for clipping.
        moments: by optimizer, for its late steps. Goes with the optimizer.
    """

    is_on_host = True

    def __init__(
        self, layouts: Sequence[UnitLayout], on_host: Sequence[bool], ranks: Communicator, ledger: Ledger
    ) -> None:
        self.device = ranks.streams.device
        self._streams = streams = ranks.streams
        self._pinned = PinnedMemory(self.device)
        self.grads = HostGrads(self.device)
        self.moments: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
        # Weak: units own this object.
        self._places: dict[nn.Parameter, tuple[weakref.ref[Unit], FlatParam, Param]] = {}
        trained = [
            [flat.layout for flat in each.flat_params if flat.kind.trains and is_here]
            for each, is_here in zip(layouts, on_host, strict=True)
        ]
        numel = max(sum(flat.shard_numel for flat in unit) for unit in trained)
        copied = Rule.HOST_COPIED
        buffers = [ledger.allocate(Category.STAGING, numel, torch.float32) for _ in range(2)]
        stored = [Fence(streams, copied, StreamName.STORE, f"staging {n}", StreamName.COMM) for n in (0, 1)]
        self._staging = list(zip(buffers, stored, strict=True))  # two take turns
        counts = [sum(len(flat.params) for flat in unit) for unit in trained]
        norms = ledger.allocate(Category.NORMS, sum(counts), torch.float64)
        self._norms = norms.split(counts)  # by unit
        self._stored = [Fence(streams, copied, StreamName.STORE, "stored state", StreamName.FETCH) for _ in layouts]
        # Two chunks take turns, so that copies in both directions and steps overlap: the fence behind a chunk's copies
        # to the host, and its tensors. FETCH has allocated these, and may reuse their memory behind the fence.
        chunks = [Fence(streams, copied, StreamName.STORE, f"chunk {n}", StreamName.FETCH) for n in (0, 1)]
        self._chunks: list[tuple[Fence, list[torch.Tensor]]] = [(fence, []) for fence in chunks]
        self._fetched = Fence(streams, Rule.SHARDS_WRITTEN, StreamName.FETCH, "fetched shards", StreamName.COMM)
        self._reduced = Fence(streams, Rule.RESULTS_ARRIVED, StreamName.COMM, "reduced main grads", StreamName.STORE)
        self._stepped = Fence(streams, copied, StreamName.FETCH, "stepped chunks", StreamName.STORE)
        self._written = Fence(
            streams, Rule.SHARDS_WRITTEN, StreamName.COMPUTE, "what compute has written", StreamName.FETCH
        )
        self._copied = [
            Fence(streams, copied, name, f"host memory, {name.value}", StreamName.HOST)
            for name in (StreamName.FETCH, StreamName.STORE)
        ]
        self._computed = Fence(streams, copied, StreamName.COMPUTE, "what others copy to the host", StreamName.HOST)
        self._is_busy = False  # copies may be under way, or steps late
        self._late: list[Any] = []  # of type LateStep
        self._failure: str | None = None  # how a late step has failed
        self._error: Exception | None = None  # the same, if nobody has raised it
        self._life = Life()  # of parameters here: if this object goes before a late step is carried out, they are stale

    def begin(self, units: Sequence[Unit]) -> None:
        """The units are complete, and buffers are filled. Their parameters do not change."""
        self._written.record()
        self._written.wait()  # rule 5
        for unit in (each for each in units if each.home is self):
            norms = iter(self._norms[unit.index])
            for flat in unit.flat_params:
                for param in flat.params:
                    self._places[param.sharded] = weakref.ref(unit), flat, param
                    cast(ShardedParameter, param.sharded).life = self._life
                    self.grads.add(param, next(norms) if flat.kind.trains else None)

    def __del__(self) -> None:
        if self._late:
            self._life.why_over = (
                "was kept when its model was freed, before the last optimizer step was carried out: read the weights "
                "before, for example by model.full_state_dict()"
            )

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Pinned memory, see `PinnedMemory.allocate`. No view: buffers of a block are not one tensor's."""
        return self._pinned.allocate(numel, dtype).data

    def launch(
        self, stream: StreamName, what: Collective, action: Callable[[], None], reads: Any = (), writes: Any = ()
    ) -> None:
        """Run `action` on `stream`. Every use of host memory by the device comes through here.

        Args:
            stream: FETCH, STORE, or COMM for norms.
            what: COPY, STEP or NORMS.
            action: issues the copies or kernels.
            reads, writes: for observers, the tensors that it reads and writes.
        """
        self._is_busy = True
        for observer in self._streams.observers:
            observer.on_collective(stream, what, None, reads, writes)
        with self._streams.on(stream), torch.no_grad():
            action()

    def copy(self, stream: StreamName, pairs: _Pairs) -> None:
        """Copy the second tensor of each pair to the first, on `stream`."""

        def action() -> None:
            for pair in pairs:
                to, source = (each.view(-1).split(max(_COPY_BYTES // each.itemsize, 1)) for each in pair)
                for part, read in zip(to, source, strict=True):
                    part.copy_(read, non_blocking=True)

        self.launch(stream, Collective.COPY, action, [source for _, source in pairs], [to for to, _ in pairs])

    # -- weights --------------------------------------------------------------------------------------------------

    def _cast(self, unit: Unit) -> None:
        """Cast weights that the user has changed to the all-gather input, on the host.

        No copy is under way: whoever changes weights calls `settle` first, and nothing is fetched before the cast.
        """
        self._streams.observe(StepPart.CAST, unit.index, begins=True)
        with torch.no_grad():
            for flat in unit.flat_params:
                if flat.host_input is not flat.main:
                    flat.host_input.copy_(flat.main)
        unit.versions_cast = unit.versions()
        self._streams.observe(StepPart.CAST, unit.index, begins=False)

    def fetch(self, unit: Unit) -> None:
        """See `Home.fetch`: into the unit's slot, stepped if a step is late."""
        if unit.versions_cast != unit.versions():  # a cast moves 6 bytes of host memory per parameter
            self._cast(unit)
        slot = unit.weight_slot
        slot.released.wait(StreamName.FETCH)  # rule 2
        if unit.grads.slot.weights is not None:
            unit.grads.slot.drained.wait(StreamName.FETCH)  # rule 2
        slot.arrived.wait(StreamName.FETCH)  # rule 1, of an all-gather that compute has not waited for
        self._stored[unit.index].wait()  # rule 8
        stepped = {param for step in self._late for param in step.params_of(unit.index)}
        pairs = [
            (flat.gather.shard, flat.host_input)
            for flat in unit.flat_params
            # If all its parameters step late, the step itself fills the slot.
            if not stepped.issuperset(param for param in flat.params if param.local.numel)
        ]
        self.copy(StreamName.FETCH, pairs)
        try:
            self._step(unit.index, fills_slot=True)
        except Exception as error:  # the all-gather goes on: other ranks wait for this rank's part
            self._error = error
        self._fetched.record()
        self._fetched.wait()  # rule 5

    # -- gradients ------------------------------------------------------------------------------------------------

    def begin_reduction(self, unit: Unit, *, adds: bool) -> tuple[list[torch.Tensor], bool]:
        """See `Home.begin_reduction`: into staging, which holds main grads if reductions add to them.

        A pass all-gathers each unit that was stepped, before it reduces any, so no step of the unit is late. But the
        backward of an earlier forward, which raises, finds the weights in their slot.
        """
        self._step(unit.index, fills_slot=False)
        self._staging.reverse()
        (staging, free), trained = self._staging[0], unit.trained
        sizes = [flat.layout.shard_numel for flat in trained]
        buffers = list(staging.narrow(0, 0, sum(sizes)).split(sizes))
        if adds:
            # A factor counts for the gradients in memory, not for those that are added to them.
            if not self.grads.multiplied.isdisjoint(unit.params):
                self.settle()
            free.wait(StreamName.FETCH)  # rule 8
            self._stored[unit.index].wait()  # rule 8
            self.copy(StreamName.FETCH, [(to, flat.main_grads) for to, flat in zip(buffers, trained, strict=True)])
            self._fetched.record()
            self._fetched.wait()  # rule 5
        else:
            free.wait()  # rule 8
        return buffers, adds

    def end_reduction(self, unit: Unit, buffers: Sequence[torch.Tensor]) -> None:
        """See `Home.end_reduction`. Stores the results in the main grads, and takes norms on the way."""
        flats = list(zip(unit.trained, buffers, strict=True))

        take_norms = functools.partial(self.grads.take_norms, flats)
        self.launch(StreamName.COMM, Collective.NORMS, take_norms, buffers, (self._norms[unit.index],))
        self._reduced.record()
        self._reduced.wait()  # rule 7
        self.grads.replace(unit.params)
        # Aliases: their version counters are not those of gradients that the user holds.
        self.copy(StreamName.STORE, [(flat.main_grads.data, each) for flat, each in flats])
        _, free = self._staging[0]
        free.record()
        self._stored[unit.index].record()

    # -- steps ----------------------------------------------------------------------------------------------------

    def find(self, param: nn.Parameter) -> tuple[Unit, FlatParam, Param] | None:
        """Where `param` is; None: not in this model."""
        place = self._places.get(param)
        unit = None if place is None else place[0]()
        return None if place is None or unit is None else (unit, *place[1:])

    def copy_of(self, number: torch.Tensor) -> torch.Tensor:
        """A copy that FETCH may read, on whatever device. Whoever frees it need not wait for FETCH."""
        copy = number.clone()
        self._streams.keep(copy)
        return copy

    def add_step(self, step: Any) -> None:
        """Carry out `step`, a `LateStep`, later, unit by unit. Versions say by now that its weights have changed."""
        # Compute has written the options and factors that the step reads.
        self._written.record()
        self._is_busy = True
        self._late.append(step)

    def _step(self, unit: int, *, fills_slot: bool) -> None:
        """Carry out the late steps of the unit with this index."""
        for step in self._late:
            if step.params_of(unit):
                self._written.wait()  # rule 5
                self._stored[unit].wait()  # rule 8
                try:
                    step.run(self, unit, fills_slot=fills_slot)
                    self._stored[unit].record()  # its last chunk is on its way to the host
                except BaseException as error:
                    self._failure, self._late = describe(error), []
                    raise
        self._late = [step for step in self._late if not step.is_done]

    @contextlib.contextmanager
    def chunk(self) -> Iterator[list[torch.Tensor]]:
        """The body fetches and steps a chunk, calls `stepped`, and stores it. Yields where to keep its tensors."""
        stored, tensors = self._chunks[0]
        self._chunks.reverse()
        stored.wait()  # rule 8
        tensors.clear()
        yield tensors
        stored.record()

    def stepped(self) -> None:
        """A chunk is stepped: STORE waits (rule 8)."""
        self._stepped.record()
        self._stepped.wait()  # rule 8

    # -- readers --------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Carry out late steps and factors, and let the host wait for all copies. The caller is about to use memory.

        Raises:
            ShardingError: see `refuse_failed`.
        """
        self.refuse_failed()
        if not self._is_busy and not self.grads.multiplied:
            return
        for unit in range(len(self._stored)):
            self._step(unit, fills_slot=False)
        for fence in self._copied:
            fence.record()
            fence.wait()  # rule 8
        self._is_busy = False
        self.grads.settle()

    def refuse_failed(self) -> None:
        """Raise if a late step has failed.

        Raises:
            ShardingError: says how.
        """
        if self._failure is not None:
            raise ShardingError(
                f"an optimizer's step has failed ({self._failure}), and some weights and state are stepped and others "
                "are not: load all, by load_checkpoint(directory, model, optimizer) on all ranks"
            )

    def raise_failure(self) -> None:
        """Raise the error of a late step that `fetch` has carried out. Ranks have issued the same collectives."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """The body loads all weights and state. If it succeeds, it does not matter that a late step has failed."""
        failure, self._failure, self._error = self._failure, None, None
        try:
            yield
        except BaseException:
            self._failure = failure
            raise

    def wait_for_others(self) -> None:
        """Let the host wait for copies that somebody else has issued on the compute stream."""
        self._computed.record()
        self._computed.wait()  # rule 8

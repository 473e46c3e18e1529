"""Gradients on their way out of a backward: into the slot of their unit, over ranks, over replicas, to the optimizer.

`Reductions` owns the reductions under way. `UsedParams` lets ranks agree on which parameters had a gradient. A
parameter that no rank used keeps ``grad = None``, so the optimizer skips it, as under DistributedDataParallel. A CUDA
rank that has used all parameters knows the answer, and its host does not wait for the exchange.

[Note: steps inside backward]
If a parameter has a hook of the user (``register_post_accumulate_grad_hook``), its unit gives gradients to the
parameters that this rank has used as soon as they are reduced: when the reduction after it has started. If hooks clear
``.grad``, as those that step an optimizer do, main grads of only two units have memory at once. Parameters that only
other ranks have used follow at the end of the backward, as all do with slots for all units, over sockets, with
`keep_main_grads`, state in host memory, and replicas. So hooks run in an order of this rank's own, and nothing in them
may wait for other ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from streamshard.comm.communicator import Communicator
from streamshard.comm.streams import Fence, Rule, StreamName, Work
from streamshard.core.params import Param, use_of
from streamshard.core.slots import Ledger, Scratch
from streamshard.core.unit import Unit
from streamshard.core.unit_grads import GradState
from streamshard.errors import RankMismatchError, ShardingError
from streamshard.guards.loop import Progress
from streamshard.planning.memory import Category
from streamshard.planning.structure import replacing
from streamshard.torch_private import AsTensors

if TYPE_CHECKING:
    from streamshard.core.outer_shards import OuterShards
    from streamshard.core.replicas import Replicas

_trainability_of = operator.attrgetter("trains")
_sharded_of, _hooks_of = operator.attrgetter("sharded"), operator.attrgetter("_post_accumulate_grad_hooks")
_EXTRA = 6  # numbers behind the flags of parameters, see `UsedParams`

OUT_OF_STEP = (
    "ranks are out of step: since the last backward an optimizer has stepped on some ranks, and not on others. Is "
    "optimizer.step() in a condition that differs (a check for nan, a rank's own loss)? Has a rank split a batch after "
    "an out-of-memory error, or left out a micro-batch? All ranks have to run as many passes per step: decide "
    "together, such as by an all_reduce of a flag. Under Join, repeat= does everything that ends a step"
)


class Reductions:
    """The reductions of one backward. Owns the fence that the optimizer waits behind.

    Args:
        units: all units.
        ranks: the shard group, over which gradients are reduced.
        ledger: allocates the flags of `UsedParams`.
        replicas: averages main grads over the replicate axis; None on a 1-D mesh.
        outer: reduces over replicas if state is cut over them too; None otherwise.

    Attributes:
        is_open: a backward runs: autograd leaves gradients in ``.grad`` of unsharded parameters.
        made: indices of units with new gradients.
        over_replicas: the reductions over replicas; None: there are none, or all ranks are reduced over at once.
        used: agrees on which parameters had a gradient.
        progress: how far the training loop has come.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        ranks: Communicator,
        ledger: Ledger,
        replicas: Replicas | None,
        outer: OuterShards | None = None,
    ) -> None:
        self.ranks = ranks
        self.replicas = replicas
        self.over_replicas = replicas or (None if outer is None or outer.is_in_order else outer)
        self.is_open = False
        self.made: set[int] = set()
        self.used = UsedParams(units, ranks, ledger, None if replicas is None else replicas.ranks)
        self._units = units
        self._gather_ranks = units[0].gather_ranks
        self.progress = Progress()
        self._reduces = True
        self._stream: Any = None  # the device's stream of the backward; None on the CPU
        self._others: dict[int, set[Any]] = {}  # by unit, further streams on which some were made
        self._under_way: list[Work | None] = []
        self._scratches: set[Scratch] = set()  # that reductions of this backward use
        self._hooked: set[int] = set()  # indices of units that give gradients early
        self._gives_next: tuple[Unit, Fence] | None = None  # gives its gradients next, behind the fence
        what = "main grads given early"  # two reductions are under way at once
        fences = [Fence(ranks.streams, Rule.RESULTS_ARRIVED, StreamName.COMM, what) for _ in range(2)]
        self._reduced = itertools.cycle(fences)
        self._done = Fence(ranks.streams, Rule.RESULTS_ARRIVED, StreamName.COMM, "main grads")
        self._finishing = ranks.waiting("the last reductions of a backward")

    def begin(self, *, is_synced: bool, reduces: bool) -> None:
        """A backward begins, on the current stream.

        Args:
            is_synced: outside of ``no_sync()``.
            reduces: gradients are reduced; False: they stay in their slots, for another backward to add to.
        """
        self._reduces, self.is_open = reduces, True
        self._stream = self.ranks.streams.device_stream(StreamName.COMPUTE)
        self.made.clear()
        self._others.clear()
        self._gives_next = None
        self._hooked.clear()
        if self.over_replicas is not None:
            self.over_replicas.begin(is_synced=is_synced)
        elif reduces:  # with replicas averages come later, and hooks run at the end
            for unit in filter(has_hooks, self._units):
                if unit.grads.may_give_early:
                    self._hooked.add(unit.index)

    def note(self, unit: int) -> None:
        """Autograd has made a gradient of the unit with this index, on the current stream. Called for each gradient."""
        self.made.add(unit)
        if self._stream is None:
            self._gather_ranks.transport.advance()  # with shared memory: adds up what all ranks have written
        elif self._stream != (stream := self.ranks.streams.device_stream(StreamName.COMPUTE)):
            # Of a layer on a stream of its own, as shared experts: the backward's waits for it only at the end.
            self._others.setdefault(unit, set()).add(stream)

    def start(self, unit: Unit) -> None:
        """Collect the gradients of the unit, which are all made, and reduce them (rule 4).

        Parameters without a gradient here send zeros.
        """
        is_new = unit.index in self.made
        self.made.discard(unit.index)
        # Whether this rank has gradients must not decide about a collective.
        if not (unit.is_trainable or unit.grads.has_unreduced) or not (self._reduces or is_new):
            return
        if unit.grads.early and self.is_open:
            raise ShardingError(
                f"a hook of register_post_accumulate_grad_hook has got the gradients of {unit.name!r}, and the same "
                "backward makes a second part of them, because it goes through two forwards: use non-reentrant "
                "checkpoints (use_reentrant=False), call the same layers on all ranks, or run one backward per forward"
            )
        # The allocator gives the memory of gradients back to the backward's stream, which has made most of them.
        with unit.reducing, self.ranks.streams.on_device_stream(self._stream):
            if self.over_replicas is not None:
                self.over_replicas.finish_before(unit)
            unit.grads.collect(self._others.pop(unit.index, ()))
            if not self._reduces:
                return
            works = unit.start_reduce()
            self._scratches.add(unit.grads.slot.scratch)
        before, self._gives_next = self._gives_next, None
        if unit.index in self._hooked:
            self._gives_next = unit, next(self._reduced)
            self._gives_next[1].record(*works)
        else:
            self._under_way += works
        if self.over_replicas is not None:
            self.over_replicas.add(unit, works)
        # Only now: behind the next reduction this wait takes no time.
        if before is not None and self.is_open:
            self._give_early(*before)

    def _give_early(self, unit: Unit, reduced: Fence) -> None:
        """Give the gradients of the unit, which are reduced. See [Note: steps inside backward]."""
        # Autograd may be on the stream of another layer: it is the backward's that has to wait.
        with self.ranks.streams.on_device_stream(self._stream), contextlib.ExitStack() as stack:
            with unit.reducing:
                reduced.wait()  # rule 7
            for ranks in {self.ranks, *(flat.ranks for flat in unit.trained)}:
                stack.enter_context(ranks.in_hook())  # ranks call hooks in orders of their own: a collective raises
            call_hooks(unit.grads.give_early(), self.progress)
        unit.grads.drop_early()

    def collect(self, unit: Unit) -> None:
        """Copy the unit's gradients that are made into its slot, or add them there. They are not reduced."""
        with unit.reducing, self.ranks.streams.on_device_stream(self._stream):
            unit.grads.collect(self._others.pop(unit.index, ()))

    def write_tied(self, unit: Unit, param: Param, grad: torch.Tensor) -> None:
        """Write a gradient in the place of its weight. See `UnitGrads.write_tied`."""
        self.note(unit.index)
        with unit.reducing, self.ranks.streams.on_device_stream(self._stream):
            unit.grads.write_tied(param, grad, self._others.get(unit.index, ()))

    def finish(self, *, follows_step: bool) -> list[nn.Parameter]:
        """Let the compute stream wait for all reductions, and set ``.grad``.

        Args:
            follows_step: see `UsedParams.start`.

        Returns:
            The parameters that have a new gradient.
        """
        self.complete(follows_step)
        used = self.used.finish()
        given: list[nn.Parameter] = []
        for unit in self._units:
            flags = used[unit.index] if used else None
            if unit.grads.state is not GradState.GIVEN:
                given += unit.grads.give(unit.params, flags)
        return given

    def complete(self, follows_step: bool | None = None) -> None:
        """Let the compute stream wait for all reductions and averages under way.

        Args:
            follows_step: start the exchange of `used` with it, behind these: the compute stream need not wait for it.
                None: no exchange.
        """
        with self._finishing:
            if self.over_replicas is not None:
                self.over_replicas.finish()
            works, self._under_way = self._under_way, []
            if self._gives_next is not None:
                works += self._gives_next[1].works  # no reduction behind it has let it give early
            self._done.record(*works)
            if follows_step is not None:
                self.used.start(follows_step)
            self._done.wait()  # rule 7: no optimizer step reads main grads that are still being reduced
        while self._scratches:
            self._scratches.pop().drop()


def has_hooks(unit: Unit) -> bool:
    """Whether the user has registered a hook for a gradient of the unit."""
    with AsTensors():
        return any(map(_hooks_of, map(_sharded_of, unit.grads.params)))


def call_hooks(params: Sequence[nn.Parameter], progress: Progress) -> None:
    """Call the user's hooks of `params`, which have a new gradient, as autograd does. Hooks may step."""
    with AsTensors():
        all_hooks = list(map(_hooks_of, params))
    if any(all_hooks):
        with replacing((vars(progress), "calls_hooks", True)):
            for param, hooks in zip(params, all_hooks, strict=True):
                for hook in list((hooks or {}).values()):  # a copy: a hook may remove itself
                    hook(param)


class UsedParams:
    """The exchange of one flag per parameter: whether it had a gradient. Owns its fences, two for each stage.

    Six more numbers come behind them. Two are for the number of micro-batches of this backward, n and 255 - n: their
    maxima over ranks exceed 255 in sum if ranks have different n. Two are, in the same way, for a hash of which
    parameters train: a rank does not step what it has frozen. Two say whether this backward follows a step of an
    optimizer, and whether it does not: both are set if ranks have come out of step.

    Args:
        units: all units; each knows which of its parameters were used here.
        ranks: the shard group, the first stage.
        ledger: allocates uint8, see `Transport.start_flags`.
        replicas: the replicate axis, the second stage; None on a 1-D mesh.

    Attributes:
        micro_batches: of the backward that is about to end.
    """

    def __init__(
        self, units: Sequence[Unit], ranks: Communicator, ledger: Ledger, replicas: Communicator | None
    ) -> None:
        self.micro_batches = 1
        self._units = units
        self._ranks = ranks
        # The communicators of the exchanges, in order, without communicators of one rank.
        self._stages = [stage for stage in (ranks, replicas) if stage is not None and stage.world_size > 1]
        count = sum(len(unit.layout.params) for unit in units) + _EXTRA if self._stages else 0
        self._flags = [ledger.allocate(Category.FLAGS, count, torch.uint8, is_visible=True)]
        self._readers: Sequence[Work | None] = ()  # of this rank's flags
        for stage in self._stages:
            count = stage.transport.flags_numel(count)
            self._flags.append(ledger.allocate(Category.FLAGS, count, torch.uint8))
        # [rows, flags], whose maximum over rows is that of all ranks.
        # One rank has no flags: torch finds no -1 beside 0.
        self._everywhere = self._flags[-1].view(-1, max(self._flags[0].numel(), 1))
        self._sent: list[int] = []
        self._steps: torch.Tensor | None = None  # on a device: the last numbers of all ranks, on the host
        self._seen: Any = None  # the same memory, as NumPy sees it: to read a tensor counts as a wait for the device
        self._event: Any = None  # on a device: they have arrived there
        self._found: list[int] = []  # on a device: these numbers, when the host looked last
        self._exchanging = ranks.waiting("the exchange of which parameters were used")
        self._tag = sum(len(unit.flat_params) for unit in units)  # behind the tags of the flat parameters
        self._written = [
            Fence(ranks.streams, Rule.SHARDS_WRITTEN, StreamName.COMPUTE, "flags", stage.stream)
            for stage in self._stages
        ]
        self._arrived = [
            Fence(ranks.streams, Rule.RESULTS_ARRIVED, stage.stream, "everybody's flags") for stage in self._stages
        ]

    def start(self, follows_step: bool) -> None:
        """Start to tell the other ranks which parameters had a gradient on this rank.

        Args:
            follows_step: an optimizer has stepped on this rank since the last exchange.
        """
        if not self._stages:
            return
        if self._sent and self._ranks.streams.has_streams:
            self._fetch_steps()
        flags: list[int] = []
        for unit in self._units:
            flags += map(use_of, unit.params)
        for number in (
            self.micro_batches,
            hash(tuple(itertools.chain.from_iterable(map(_trainability_of, self._units)))),
        ):
            flags += number % 256, 255 - number % 256  # in a byte
        flags += follows_step, not follows_step
        with self._exchanging:
            if flags != self._sent:  # else the last exchange has sent the same
                # Every rank has read the flags of the last exchange. `_fetch_steps` (on a device) or `finish` (on CPUs)
                # has waited for that, unless an error came between.
                self._arrived[0].wait()  # rule 6
                for readers in filter(None, self._readers):
                    readers.wait()  # rule 6
                if flags[:-2] == self._sent[:-2]:  # then the host sends nothing
                    steps = self._flags[0][-2:]
                    steps.copy_(steps.flip(0))
                else:
                    is_remote = self._flags[0].device.type != "cpu"  # pinned memory, for which the host need not wait
                    told = torch.tensor(flags, dtype=torch.uint8, device="cpu", pin_memory=is_remote)
                    self._flags[0].copy_(told, non_blocking=is_remote)
                self._sent = flags
            self._start(0)

    def _start(self, stage: int) -> None:
        own, gathered = self._flags[stage : stage + 2]
        self._written[stage].record()
        self._written[stage].wait()  # rule 5: the exchange does not read flags that are still being written
        transport = self._stages[stage].transport
        work = transport.start_flags(own, gathered, self._tag)
        self._arrived[stage].record(work)
        if stage == 0:
            self._readers = transport.readers((work,))

    def finish(self) -> list[list[bool]] | None:
        """By unit, which parameters any rank used. None: take this rank's own flags.

        On a device the host waits only for a list.
        """
        if not self._stages:
            return None
        is_complete = True
        with AsTensors():
            for unit in self._units:
                for param in unit.params:
                    if not param.is_used and unit.grads.may_have_grad(param):
                        is_complete = False
        with self._exchanging:
            for stage in range(len(self._stages)):
                if stage > 0:
                    self._start(stage)
                # On the CPU not left for later: gloo's work objects must not outlive a profiler that saw them made.
                if not is_complete or not self._ranks.streams.has_streams or stage + 1 < len(self._stages):
                    self._arrived[stage].wait()  # rule 7
        if is_complete:
            return None
        anywhere = iter(self._everywhere.amax(0).bool().tolist())
        return [list(itertools.islice(anywhere, len(unit.params))) for unit in self._units]

    def _fetch_steps(self) -> None:
        """On a device: look at the last numbers that the last call has copied, and copy those of the last exchange.

        The device comes to a copy only after the backward in which it was issued. By the next backward it has arrived,
        unless the host is a whole step ahead, which then waits. So all ranks see it in the same backward.
        """
        self._arrived[-1].wait()  # rule 7
        streams, flags = self._ranks.streams, self._everywhere[:, -_EXTRA:].amax(0)
        if self._steps is None:
            is_remote = flags.device.type != "cpu"
            self._steps = torch.zeros(_EXTRA, dtype=torch.uint8, device="cpu", pin_memory=is_remote)
            self._seen, self._event = self._steps.numpy(), streams.module.Event()
        else:
            self._event.synchronize()
            self._found = self._seen.tolist()
        self._steps.copy_(flags, non_blocking=True)
        self._event.record(streams.device_stream(StreamName.COMPUTE))

    def refuse_out_of_step(self) -> None:
        """Raise on all ranks if some have stepped since the exchange before, and others have not, or counts differ.

        On a device this looks at an earlier exchange, see `_fetch_steps`.

        Raises:
            RankMismatchError: a rank has run more passes or micro-batches than others, such as two halves of a batch,
                or has frozen other parameters.
        """
        if self._stages and not self._ranks.streams.has_streams:
            self._found = self._everywhere[:, -_EXTRA:].amax(0).tolist()
        if not self._found:
            return
        most, others, trained, untrained, *steps = self._found
        if most + others > 255:
            raise RankMismatchError(
                f"model.accumulate got {most} micro-batches on one rank and {255 - others} on another one, so that "
                "their gradients count differently: give all ranks as many"
            )
        if trained + untrained > 255:
            raise RankMismatchError(
                "some ranks have frozen parameters (requires_grad_(False)) that train on others: freeze the same on "
                "all ranks. A layer that only some ranks use need not be frozen"
            )
        if all(steps):
            raise RankMismatchError(OUT_OF_STEP)

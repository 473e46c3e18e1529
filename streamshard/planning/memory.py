"""Which unit uses which slot, and which buffers exist.

Pure functions: everything is known before anything is allocated.

[Note: slots]
A unit always uses the same slots, so every unsharded parameter is made once and all addresses stay fixed. Streamed
units but the ends (*blocks*) take turns in the block slots. Counted from the end, the last block uses slot 1, the block
before it slot 2, and so on, modulo their number: with two slots 1, 0, 1, .. Each slot has the size of its largest unit.
A resident unit (the root unit, a lone layer) has a weight slot of its own, so it does not size the others'. Its weights
are all-gathered once in a pass and stay until its gradients take their place.

A slot has two tenants: the weights of a unit, then its gradients. When the unit's backward is over, nobody needs its
weights any more. Gradients have the dtype of the weights (autograd makes them so), hence the same size and offsets.
They are copied into the unit's own weight slot and reduced there. The next all-gather into the slot comes behind the
reduction.

Gradients have slots of their own where weights stay, or gradients wait:

- With "all" weight slots, every block has a slot of its own: nothing is all-gathered twice in a step (ZeRO-2), and a
  rank's shard of a unit is a range of the unit's slot if the dtypes are equal. Blocks share two grad slots, by parity;
  resident units but the root share one.
- With "all" grad slots, gradients can accumulate (ZeRO-1), in the dtype of `Precision`, and fp32 main grads lie in the
  slots until a backward adds to earlier gradients.
- Over sockets nothing orders collectives but waits of the host, and an all-gather behind a reduction would leave the
  host waiting. So gradients have two slots and one, as with "all" weight slots.

"all" is the default with one rank, where a unit's shard is the whole slot.

[Note: ends]
An embedding and a head are often larger than a block. So they take turns with the blocks too, in slot 0: one is used
before the blocks, the other behind them. The head is unit 0 from the end, so its neighbour has another slot. Code may
read these weights anywhere, and many models do. So both begin as resident units, with slots of their own, and join the
block slots once the first passes have shown on all ranks that the order of uses allows it (`streamshard.core.ends`).
The embedding is not all-gathered in backward if the passes have shown that autograd saves nothing of its weights.

[Note: memory]
S is the sum of the sizes of this rank's shards in elements, padding included; N is the number of ranks. Bytes per rank:

    main weights        4 S of flat parameters that train
    main grads          4 S of flat parameters that train, from a unit's reduction until a forward finds no ``.grad``;
                        0 while they lie in "all" fp32 grad slots, which they do not if state is cut over replicas
    frozen weights      m S of the others; m bytes per element of the storage dtype
    quantization        tensors beside packed weights, whole on each rank (`streamshard.forms`)
    wire buffers        w times the elements of the largest unit of each slot, if wire and compute dtype differ
    weight slots        p times the elements of the largest unit of each slot
    grad slots          g times the elements of the largest unit that trains, of each slot of gradients only; g bytes of
                        the compute dtype, with "all" of grad_dtype
    scratch             as the transport asks, at most p times the elements of the largest block for sums in fp32; from
                        the first reduction of a backward to the last one
    all-gather inputs   if state is cut over replicas: w/N bytes of the wire dtype, of all parameters
    flags               on CPUs N + 1 per parameter; R N + N + 1 with R replicas. On devices 2; 3 with replicas
    staging             with ``offload``: 8 times the elements of the largest shard that trains. If state is cut over
                        replicas: 8/N bytes per element of the largest unit; in ``no_sync()`` 4/N of all that train
    norms               with ``offload``: 8 per parameter that trains

All-gathers cast into this rank's range of the weight slot, or wire buffer, which takes no other memory. With
``offload`` the first three rows lie in host memory, except for units in the device budget. All-gather inputs do too: w
bytes of the wire dtype per element, of flat parameters with another storage dtype. With "all" weight slots, main or
frozen weights of the compute dtype lie in the slots.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from streamshard.config import GradSlots, SlotCount
from streamshard.planning.layout import UnitLayout

_WORTH_TURNS = 8  # a head under 1/8 of a block is not worth one more all-gather of a block in each step


class SlotPlan(NamedTuple):
    """Which unit uses which slot. See [Note: slots].

    Attributes:
        is_streamed: by unit: it shares the block slots.
        weights: by unit, its weight slot.
        grads: by unit, its grad slot.
        scratch: by unit, the scratch of its reductions.
        grads_take_weight_slots: a unit's gradients take its weight slot, whose weights nobody needs any more.
        keeps_weights: every unit has a weight slot of its own, which also holds main weights that are sent as they are.
        keeps_grads: every unit has a grad slot of its own, where gradients may stay until the next backward.
        ends: the units at both ends of the model that take turns with the blocks, see [Note: ends].
        weightless: those of them whose backward needs no weights: an embedding.
    """

    is_streamed: tuple[bool, ...]
    weights: tuple[int, ...]
    grads: tuple[int, ...]
    scratch: tuple[int, ...]
    grads_take_weight_slots: bool
    keeps_weights: bool
    keeps_grads: bool
    ends: frozenset[int] = frozenset()
    weightless: frozenset[int] = frozenset()

    def gathers(self, visits: Iterable[int], content: dict[int, int], skipped: Collection[int] = ()) -> list[int]:
        """The units that a pass all-gathers.

        Args:
            visits: the units in the order of their use.
            content: by slot, the unit in it when the pass begins; changed to the units when it ends.
            skipped: units whose visits need no weights.
        """
        gathered = []
        for unit in visits:
            if unit not in skipped and content.get(self.weights[unit]) != unit:
                content[self.weights[unit]] = unit
                gathered.append(unit)
        return gathered

    def join(self, ends: Iterable[int], weightless: Iterable[int]) -> SlotPlan:
        """The plan in which `ends` take turns with the blocks, in the first slot. For the arguments see above."""
        joined = frozenset(ends)

        def turns(slots: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(0 if unit in joined else slot for unit, slot in enumerate(slots))

        streamed = tuple(each or unit in joined for unit, each in enumerate(self.is_streamed))
        plan = self._replace(is_streamed=streamed, weights=turns(self.weights), ends=joined)
        grads = turns(self.grads) if self.grads_take_weight_slots else self.grads
        return plan._replace(grads=grads, weightless=joined.intersection(weightless))


def plan_slots(
    is_streamed: Sequence[bool], weight_slots: SlotCount, grad_slots: GradSlots, *, is_serial: bool
) -> SlotPlan:
    """Assign slots to units.

    Args:
        is_streamed: by unit; the others are resident.
        weight_slots: number of block slots, or "all": as many as there are blocks.
        grad_slots: "all": every unit has a grad slot of its own.
        is_serial: the ranks' collectives run one after the other, on a stream. Over sockets they run side by side: an
            all-gather into a slot would wait for the reduction from it, so gradients have two slots of their own.
    """
    weights = _assign(is_streamed, weight_slots)
    keeps_weights, keeps_grads = weight_slots == "all", grad_slots == "all"
    grads_take_weight_slots = is_serial and not keeps_weights and not keeps_grads
    # Two: backward fills one while the other one is reduced.
    grads = weights if grads_take_weight_slots else _assign(is_streamed, "all" if keeps_grads else 2)
    if not grads_take_weight_slots and not keeps_grads:
        resident = [unit for unit, streamed in enumerate(is_streamed) if unit > 0 and not streamed]
        for unit in resident:
            grads[unit] = grads[resident[0]]
    # Two reductions run at a time at most. One scratch per unit would take a model / N.
    scratch = [slot % (1 if is_serial else 2) for slot in grads]
    slots = tuple(weights), tuple(grads), tuple(scratch)
    return SlotPlan(tuple(is_streamed), *slots, grads_take_weight_slots, keeps_weights, keeps_grads)


def _assign(is_streamed: Sequence[bool], count: SlotCount) -> list[int]:
    """By unit, its slot: block slots are 0 to count - 1, resident units get numbers above."""
    blocks = sum(is_streamed)
    turns = blocks if count == "all" else min(count, blocks)
    # Counted from the end of the model: the last block is 1, because a head behind it may take slot 0.
    block_places, own_slots = itertools.count(blocks, -1), itertools.count(turns)
    return [next(block_places) % turns if streamed else next(own_slots) for streamed in is_streamed]


def choose_ends(
    plan: SlotPlan, n_bytes: Sequence[int], early: Collection[int], late: Collection[int]
) -> frozenset[int]:
    """The units that may join the blocks' slots: the largest of `early`, and the largest of `late`.

    Args:
        plan: without ends.
        n_bytes: by unit, the size of its weights.
        early: resident units that passes use before the first block.
        late: resident units that passes use behind the last block.
    """
    blocks = [size for size, streamed in zip(n_bytes, plan.is_streamed, strict=True) if streamed]
    if plan.keeps_weights or len(blocks) < 2:  # no units take turns
        return frozenset()
    # Sorted: all ranks choose the same one of equals.
    largest = (max(sorted(units), key=n_bytes.__getitem__) for units in (early, late) if units)
    return frozenset(unit for unit in largest if _WORTH_TURNS * n_bytes[unit] >= max(blocks))


class Category(enum.Enum):
    """What a buffer is for; the rows of the memory report."""

    MAIN_WEIGHTS = "main weights"
    MAIN_GRADS = "main grads"
    FROZEN_WEIGHTS = "frozen weights"
    QUANTIZATION = "quantization"
    ALL_GATHER_INPUTS = "all-gather inputs"
    WEIGHT_SLOTS = "weight slots"
    WIRE_BUFFERS = "wire buffers"
    GRAD_SLOTS = "grad slots"
    SCRATCH = "scratch"
    FLAGS = "flags"
    STAGING = "staging"
    NORMS = "norms"


def plan_scratch(unit: UnitLayout, numels: Iterable[int]) -> list[range]:
    """The bytes of the unit's scratch that the reductions of each flat parameter use.

    Args:
        unit: the unit.
        numels: for each flat parameter that trains, elements of its `grad_dtype`; see `Transport.scratch_numel`.
    """
    # One behind the other: on CPUs the reductions of a unit's flat parameters run side by side.
    ranges, stop = list[range](), 0
    for flat, numel in zip(unit.flat_params, numels, strict=True):
        ranges.append(range(stop, stop := stop + flat.kind.trains * numel * flat.kind.grad_dtype.itemsize))
    return ranges


def plan_host(layouts: Sequence[UnitLayout], device_bytes: int) -> list[bool]:
    """By unit, whether its state lies in host memory: of the first units it stays on the device while there is room.

    Args:
        layouts: of all units, in the order of the first forward.
        device_bytes: for main weights, main grads and Adam's moments on the device.
    """
    on_host: list[bool] = []
    for unit in layouts:
        for flat in unit.flat_params:
            kind = flat.kind
            per_element = kind.main_dtype.itemsize + 12 * kind.trains  # an fp32 gradient and two moments
            device_bytes -= flat.layout.shard_numel * per_element
        on_host.append(device_bytes < 0)  # and so are all units behind it: the first ones stay
    return on_host


def largest_of(slot_of: Sequence[int], sizes: Sequence[int]) -> dict[int, int]:
    """By slot, the largest of the `sizes` of its units."""
    largest: dict[int, int] = {}
    for slot, size in zip(slot_of, sizes, strict=True):
        largest[slot] = max(largest.get(slot, 0), size)
    return largest

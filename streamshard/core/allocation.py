"""A model's buffers, allocated once: slots, each as large as its largest unit, then the units in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from streamshard.comm.communicator import Communicator
from streamshard.core.params import FlatParam
from streamshard.core.slots import GradSlot, Ledger, Scratch, WeightSlot
from streamshard.core.unit import Home, Unit
from streamshard.planning.layout import UnitLayout
from streamshard.planning.memory import Category, SlotPlan, largest_of, plan_scratch

# Called with a unit's layout and its flat parameters: copies the model's weights into these, and frees the model's.
TakeWeights = Callable[[UnitLayout, Sequence[FlatParam]], None]


def allocate_units(
    layouts: Sequence[UnitLayout],
    plan: SlotPlan,
    ranks: Communicator,
    experts: Communicator,
    ledger: Ledger,
    take: TakeWeights,
    homes: Sequence[Home | None],
    gather_ranks: Communicator | None,
    *,
    reduces_at_once: bool,
    keeps_main_grads: bool,
) -> list[Unit]:
    """Allocate slots, and make the units.

    Memory for gradients is allocated last. By then the model's own memory is free: each unit's is freed before the next
    unit's shards are allocated.

    Args:
        layouts, plan, ranks, ledger: the model's.
        experts: the ranks that cut flat parameters of experts.
        take: see `TakeWeights`.
        homes: by unit, the home of its state, see `Unit`.
        gather_ranks: the ranks of all-gathers and reductions in a step; None: those that cut a flat parameter.
        reduces_at_once: all ranks that cut a flat parameter reduce it at once, not `gather_ranks`.
        keeps_main_grads: main grads always have memory.
    """
    weight_slots, wires = _weight_slots(layouts, plan, ranks, ledger)
    flat_params: list[list[FlatParam]] = []
    for layout, slot, home in zip(layouts, plan.weights, homes, strict=True):
        own = []
        for flat_plan in layout.flat_params:
            cut_by = experts if flat_plan.kind.is_expert else ranks
            flat = FlatParam(
                *(flat_plan, weight_slots[slot], wires[slot], cut_by, ledger, gather_ranks or cut_by),
                keeps_slot=plan.keeps_weights,
                is_on_host=home is not None and home.is_on_host,
            )
            if reduces_at_once:
                flat.reduce_ranks = ranks  # not in two levels: one order of all ranks' gradients
            own.append(flat)
        flat_params.append(own)
        take(layout, own)
    # With outer shards the slot's range is larger than this rank's main grads.
    keeps_slot = plan.keeps_grads and gather_ranks is None
    grad_slots, parts = _grad_slots(layouts, plan, ranks, ledger, flat_params, weight_slots, keeps_main_grads)
    units = []
    for index, layout in enumerate(layouts):
        weight_slot, grad_slot = weight_slots[plan.weights[index]], grad_slots[plan.grads[index]]
        for flat, part in zip(flat_params[index], parts[index], strict=True):
            if flat.kind.trains:
                flat.allocate_grads(grad_slot, part, keeps_slot=keeps_slot, keeps_memory=keeps_main_grads)
        given = index, layout, flat_params[index], weight_slot, grad_slot, ranks
        units.append(Unit(*given, is_streamed=plan.is_streamed[index], home=homes[index], gather_ranks=gather_ranks))
    # Not before: torch makes no view of a buffer without memory.
    for grad_slot in grad_slots.values():
        grad_slot.scratch.drop()
    return units


def _weight_slots(
    layouts: Sequence[UnitLayout], plan: SlotPlan, ranks: Communicator, ledger: Ledger
) -> tuple[dict[int, WeightSlot], dict[int, torch.Tensor]]:
    """By number, the weight slots and the wire buffers beside them."""
    slots: dict[int, WeightSlot] = {}
    for slot, n_bytes in largest_of(plan.weights, [layout.weight_bytes for layout in layouts]).items():
        # CPU ranks of one machine read a shard in its owner's slot, where the all-gather has cast it.
        buffer = ledger.allocate(Category.WEIGHT_SLOTS, n_bytes, torch.uint8, is_visible=True)
        # Streamed weights leave a slot of one unit too, for their gradients.
        is_shared = (
            plan.weights.count(slot) > 1 or plan.grads_take_weight_slots and plan.is_streamed[plan.weights.index(slot)]
        )
        slots[slot] = WeightSlot(buffer, ranks.streams, f"weight slot {slot}", is_shared=is_shared)
    # Visible, too: what is sent in another dtype than layers compute in is read there.
    wire_bytes = largest_of(plan.weights, [layout.flat_params[-1].wire.stop for layout in layouts])
    category = Category.WIRE_BUFFERS
    wires = {slot: ledger.allocate(category, size, torch.uint8, is_visible=True) for slot, size in wire_bytes.items()}
    return slots, wires


def _grad_slots(
    layouts: Sequence[UnitLayout],
    plan: SlotPlan,
    ranks: Communicator,
    ledger: Ledger,
    flat_params: Sequence[Sequence[FlatParam]],
    weight_slots: dict[int, WeightSlot],
    keeps_memory: bool,
) -> tuple[dict[int, GradSlot], list[list[range]]]:
    """By number, the slots of gradients, in weight slots or buffers of their own; each flat parameter's scratch."""
    # Reductions of larger units go through the scratch in parts: it need not be as large as a head.
    streamed = [layout.weight_bytes for layout, each in zip(layouts, plan.is_streamed, strict=True) if each]
    limit = max(streamed, default=max(layout.weight_bytes for layout in layouts))

    numels = [[flat.scratch_numel(flat.kind.grad_dtype, limit) for flat in own] for own in flat_params]
    parts = list(map(plan_scratch, layouts, numels))
    sizes = largest_of(plan.scratch, [own[-1].stop for own in parts])
    scratch = {number: Scratch(n_bytes, ledger, keeps_memory=keeps_memory) for number, n_bytes in sizes.items()}
    scratch_of = {slot: scratch[number] for slot, number in zip(plan.grads, plan.scratch, strict=True)}
    slots: dict[int, GradSlot] = {}
    for slot, n_bytes in largest_of(plan.grads, [layout.flat_params[-1].grads.stop for layout in layouts]).items():
        weights = weight_slots[slot] if plan.grads_take_weight_slots else None
        if weights is None:
            buffer = ledger.allocate(Category.GRAD_SLOTS, n_bytes, torch.uint8, is_visible=True)
        else:
            buffer = weights.buffer
        slots[slot] = GradSlot(buffer, weights, ranks.streams, scratch_of[slot], f"grad slot {slot}")
    return slots, parts


def join_slots(units: Sequence[Unit], plan: SlotPlan, ledger: Ledger) -> None:
    """Move the ends of the model, and the blocks that they take turns with, into one slot. No pass runs. Collective.

    The largest of their slots becomes this slot. So nothing is allocated, and no flat parameter grows.

    Args:
        units, ledger: the model's.
        plan: with its ends.
    """
    joined = [unit for unit in units if plan.weights[unit.index] == 0]
    slots = dict.fromkeys(unit.weight_slot for unit in joined)
    kept = max(slots, key=lambda slot: slot.buffer.nbytes)
    grads = {unit.grads.slot.weights: unit.grads.slot for unit in joined}
    for unit in joined:  # on CPUs; compute has waited for the last pass's collectives when it ended
        unit.weight_slot.arrived.complete()
        unit.weight_slot.shard_read.complete()
        unit.grads.slot.drained.complete()
    for unit in joined:
        # A gradient slot that is no weight slot stays the unit's.
        unit.use_slots(kept, grads.get(kept, unit.grads.slot))
        if unit.index in plan.ends:
            unit.is_streamed = True
            unit.guard.share()
    kept.is_shared = True  # it may have been an end's own
    ledger.free([slot.buffer for slot in slots if slot is not kept])

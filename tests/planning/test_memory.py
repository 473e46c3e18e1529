"""What the engine holds: reported exactly, and allocated once, without a copy of the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from streamshard import StreamShard
from streamshard.comm.shared_memory import SharedMemoryTransport
from streamshard.nested import tensors_in
from tests.counts import engine_inside
from tests.faults import case
from tests.models import DIM, Stack, TinyConfig, TinyLM
from tests.ranks import RankContext, on_ranks
from tests.reference import adamw, lm_step, sharded_model, stack_step, train_stack
from tests.scenarios import BF16, PRECISIONS, RoutedStack, over_sockets, sharded, train
from tests.simulated import simulated_device

MODELS: list[tuple[Any, Any]] = [
    (lambda: TinyLM(TinyConfig(depth=3)), lm_step),
    (lambda: Stack((16, 3, 40, 1, 24)), stack_step),
]


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "way", "precision"),
    [(1, "shared memory", "16-bit"), (2, "shared memory", "bf16"), (2, "sockets", "16-bit wire")],
)
def test_the_report_is_of_what_is_held(context: RankContext, way: str, precision: str) -> None:
    """Before the first step, after two, and where main grads have no memory. How much that is: `training/test_dial`."""
    for build, step in MODELS:
        with case(step.__name__), over_sockets() if way == "sockets" else nullcontext():
            model: Any = StreamShard(build(), precision=PRECISIONS[precision])
            assert model.memory_report().start_bytes == sum(_reachable_storages(model).values())
            train_stack(model, adamw(model), context, steps=2, step=step)
            report = model.memory_report()
            held_bytes = report.total_bytes - report.held_bytes["scratch"]  # which has memory in a backward only
            assert held_bytes == sum(_reachable_storages(model).values())
            with torch.no_grad():  # a forward finds no gradients
                model(torch.zeros(4, DIM, dtype=torch.long)[:, :4] if step is lm_step else torch.zeros(4, DIM))
            assert report.start_bytes == held_bytes - (context.world_size > 1) * report.held_bytes["main grads"]
            assert model.memory_report().start_bytes == sum(_reachable_storages(model).values())
            assert report.numel == sum(param.numel() for param in build().parameters())
            assert report.world_size == context.world_size


def _reachable_storages(model: nn.Module) -> dict[int, int]:
    """Bytes by address of every storage that the engine's objects lead to, on this rank.

    Left out are the model's own buffers, and other ranks' shared memory. On one rank parameters are storages inside of
    others.
    """
    storages: dict[int, int] = {}
    buffers = {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}
    transport, others = engine_inside(model).ranks.transport, []
    if isinstance(transport, SharedMemoryTransport):
        memories = [each for each in transport._buffers if each is not transport._own]
        others = [range(each.start, each.start + len(each._memory)) for each in memories]
    for tensor in _tensors_behind(engine_inside(model)):
        with torch._C.DisableTorchFunctionSubclass():  # compute views, which may be absent
            storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if storage.nbytes() and start not in buffers and not any(start in other for other in others):
            storages[start] = max(storage.nbytes(), storages.get(start, 0))
    ends = {start: start + size for start, size in storages.items()}
    return {
        start: size
        for start, size in storages.items()
        if not any(other < start and start + size <= end for other, end in ends.items())
    }


def _tensors_behind(start: object) -> Iterator[torch.Tensor]:
    seen: set[int] = set()
    todo = [start]
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            yield thing
        elif isinstance(thing, list | tuple | set | frozenset):
            todo.extend(thing)
        elif isinstance(thing, dict):
            todo.extend(thing.values())
        elif type(thing).__module__.startswith("streamshard") and not isinstance(thing, nn.Module | type):
            todo.extend(getattr(thing, "__dict__", {}).values())
            slots = getattr(type(thing), "__slots__", ())
            todo.extend(getattr(thing, slot, None) for slot in ([slots] if isinstance(slots, str) else slots))


# -- allocated once -----------------------------------------------------------------------------------------------

# Units, slots and main grads of each kind, and passes that leave or repeat them.
ALLOCATING = (
    *("large embedding and head", "no_sync", "reentrant checkpointing", "layers used twice"),
    *("adapters in micro-batches", "norms in fp32", "summoning", "a backward that fails", "weights read elsewhere"),
)


@on_ranks(2)
@pytest.mark.parametrize("scenario", ALLOCATING)
def test_the_engine_allocates_nothing_after_the_first_step(context: RankContext, scenario: str) -> None:
    """With main grads that keep their memory: the same buffers at the same addresses, and no other memory."""
    model = sharded(scenario, PRECISIONS["16-bit wire"], keep_main_grads=True)
    engine = engine_inside(model)
    at_start = _reachable_storages(model)
    train(model, scenario, context, steps=2)  # then embedding and head take turns with the layers
    buffers = [(category, buffer.data_ptr()) for category, buffer in engine.ledger.buffers]
    storages = _reachable_storages(model)
    train(model, scenario, context, steps=3)
    assert [(category, buffer.data_ptr()) for category, buffer in engine.ledger.buffers] == buffers
    assert _reachable_storages(model) == storages
    assert storages.items() <= at_start.items()


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that operations have made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))}
        made = [t.numel() for t in tensors_in(result) if t.untyped_storage().data_ptr() not in given]
        self.numel = max([self.numel, *made])
        return result


@on_ranks(2)
def test_forward_and_backward_allocate_no_whole_unit(context: RankContext) -> None:
    """Weights are gathered and gradients reduced in place: a step makes activations and gradients, not copies."""
    model = sharded_model(RoutedStack)
    call = context.call(0)
    stack_step(model, call)
    unit_numel = engine_inside(model).units[1].layout.numel
    with _Largest() as largest:
        stack_step(model, call)
    assert largest.numel == DIM * DIM < unit_numel  # autograd's gradient of one weight


# -- while a model is built -------------------------------------------------------------------------------------------


def _walk(events: Sequence[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _walk(event.children)


@on_ranks()
@pytest.mark.parametrize("world_size", [1, 2])
def test_building_takes_no_more_than_what_stays_and_a_unit(context: RankContext) -> None:
    """The model's own memory goes unit by unit, before there is any for gradients: 48 MiB that are not there twice."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, simulated_device():
        model = StreamShard(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12))), precision=BF16)
    assert len(list(model.parameters())) == 24
    kind = torch._C._profiler._EventType.Allocation
    events = [e for e in _walk(profiled.profiler.kineto_results.experimental_event_tree()) if e.tag == kind]
    live: dict[int, int] = {}
    peak = used = 0
    for event in sorted(events, key=lambda event: event.start_time_ns):
        size = event.extra_fields.alloc_size
        used += size if size > 0 else -live.pop(event.extra_fields.ptr, 0)  # what was there before is not known
        if size > 0:
            live[event.extra_fields.ptr] = size
        peak = max(peak, used)
    model_and_slots = 12 * 2**22 + 2 * 2**21
    assert peak < max(used, model_and_slots) + 5 * 2**20, (peak, used, model_and_slots)

"""The path of accelerators on a machine without one: events, NcclTransport, streams that are as late as allowed."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from streamshard import Precision, StreamShard
from streamshard.checkpoint.disk_layout import TensorPiece
from streamshard.checkpoint.save import start_copies
from streamshard.comm.nccl import NcclTransport
from streamshard.comm.streams import Collective, Fence, Observer, Rule, StreamName, Streams
from streamshard.core import graph_hooks
from streamshard.errors import ShardingError
from tests.compare import EXACT, NEAR, Tolerance, assert_same, full_weights
from tests.counts import Operators, counted, engine_inside
from tests.faults import Trouble, failing
from tests.models import DIM, vector_batch
from tests.optim.test_step_in_backward import step_in_hooks
from tests.ranks import RankContext, on_ranks
from tests.reference import ALL_SLOTS, FP32, adamw, mesh_2d, stack_step
from tests.scenarios import ADDING, BF16, PRECISIONS, RoutedStack, reference, sharded, train
from tests.simulated import (
    CPU,
    SimulatedDevice,
    SimulatedStream,
    backward_elsewhere,
    checking_streams,
    late,
    simulated_device,
)
from tests.training.test_matrix import SETTINGS

# Sums in bf16 are rounded in another order than the CPU's transports, which widen before they add.
OWN_SUMS = Tolerance(2e-2, 2e-2)


# Where streams and events differ: gradients in parts, other orders and passes, weights elsewhere; with each setting.
_CELLS = (
    *(("no_sync", each) for each in ("ZeRO-3, fp32", "ZeRO-3", "ZeRO-1, fp32", "3 slots", "several layers")),
    ("a kept graph", "ZeRO-3, fp32"),
    ("a kept graph", "ZeRO-1, fp32"),
    ("tied", "ZeRO-3"),
    ("layers unused on some ranks, recomputed", "ZeRO-3, fp32"),
    ("an order that changes", "several layers"),
    ("evaluation between steps", "ZeRO-3"),
    ("adapters", "ZeRO-1, fp32"),
    ("clipping", "3 slots"),
    ("a backward that fails", "ZeRO-3"),
    ("weights read elsewhere", "ZeRO-3, fp32"),
    ("a head that a loss reads", "3 slots"),
)


def test_a_stream_that_is_not_there_is_no_other_one() -> None:
    """A wrong name would put copies on the compute stream, where they overlap with nothing."""
    with simulated_device(), pytest.raises(KeyError):
        Streams(CPU).device_stream(StreamName.FETCH)


@on_ranks(2)
@pytest.mark.parametrize(("scenario", "setting"), _CELLS)
def test_late_collectives_change_nothing(context: RankContext, scenario: str, setting: str) -> None:
    """Backward runs in a thread of its own; what is read too early is NaN, or old."""
    precision, slots = SETTINGS[setting]
    with simulated_device(), backward_elsewhere():
        model = sharded(scenario, precision, **slots)
        assert type(engine_inside(model).ranks.transport) is NcclTransport
        with late(model):
            train(model, scenario, context)
            found = full_weights(model)
    wanted = reference(context, scenario, precision)
    assert_same(found, wanted, "weights", NEAR if scenario in ADDING else EXACT)


@on_ranks()
@pytest.mark.parametrize(("world_size", "precision"), [(2, "16-bit wire"), (3, "16-bit"), (2, "wire")])
def test_every_precision_is_reduced_right(context: RankContext, precision: str) -> None:
    """Early collectives, each on its own stream from the first meeting of ranks on, and no races."""
    tolerance = OWN_SUMS if precision == "16-bit" else NEAR
    given = PRECISIONS.get(precision) or Precision(param_dtype=torch.float32, wire_dtype=torch.bfloat16)
    with simulated_device() as device, checking_streams(device) as streams:
        model = sharded("micro-batches", given)
        comm = engine_inside(model).streams.device_stream(StreamName.COMM)
        assert streams.collectives["allreduce_", comm] == 1
        with streams.of(model):
            train(model, "micro-batches", context)
            found = full_weights(model)
    assert_same(found, reference(context, "micro-batches", given), "weights", tolerance)
    assert streams.in_place["_allgather_base_"]
    assert bool(streams.in_place["_reduce_scatter_base_"]) is (precision != "16-bit wire")


@on_ranks(4)
@pytest.mark.parametrize(("shape", "slots"), [((2, 2), ALL_SLOTS), ((4, 1), {})])
def test_averages_are_ordered_by_events(context: RankContext, shape: tuple[int, int], slots: dict[str, Any]) -> None:
    """No races, though no host waits for a work. A model may be freed while gathers are under way."""
    with simulated_device() as device, checking_streams(device) as checker:
        model = sharded("a kept graph", BF16, mesh=mesh_2d(*shape), keep_main_grads=True, **slots)
        with checker.of(model):
            train(model, "a kept graph", context)
    engine = engine_inside(model)
    own = {engine.streams.device_stream(name) for name in (StreamName.COMM, StreamName.REPLICA)}
    assert all(stream.device == engine.streams.device and stream.priority < 0 for stream in own)
    used = {buffer: {each.stream for each in checker.accesses_to(buffer)} for _, buffer in engine.ledger.buffers}
    assert own & set().union(*used.values())
    for buffer, streams in used.items():
        assert streams - {device.compute} <= device.kept.get(buffer.data_ptr(), set())


@contextlib.contextmanager
def counting_waits(device: SimulatedDevice) -> Iterator[list[str]]:
    """What the host has waited for, at the end: values of tensors, copies to the host and from it, the device."""
    names = ("tolist", "item", "numpy", "cpu", "__bool__", "__float__", "__int__")
    waits: list[str] = []
    with contextlib.ExitStack() as stack:
        # torch.tensor copies from memory that is not pinned.
        places = [(torch, "tensor"), (device, "synchronize"), *((Tensor, name) for name in names)]
        calls = {name: stack.enter_context(counted(owner, name)) for owner, name in places}
        operators = stack.enter_context(Operators())
        yield waits
    waits += [name for name, each in calls.items() for _ in each]
    waits += ["a value"] * sum(operators.counts[f"aten.{name}.default"] for name in ("_local_scalar_dense", "nonzero"))


@on_ranks(2)
def test_the_host_never_waits_in_a_steady_step(context: RankContext) -> None:
    """Nor does clipping by the model's own method; micro-batches neither."""
    with simulated_device() as device:
        model: Any = sharded("unequal layers", BF16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)  # has no step counter

        def step(number: int) -> None:
            with model.no_sync():
                stack_step(model, context.call(2 * number))
            stack_step(model, context.call(2 * number + 1))
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

        for number in range(2):
            step(number)
        with counting_waits(device) as waits:
            step(2)
        assert not waits, waits
        with counting_waits(device) as waits:
            model.clip_grad_norm_(1.0).item()
        assert "item" in waits


class _Order(Observer):
    """The tags of all-gathers, in order, and where comm waits for main weights."""

    def __init__(self) -> None:
        self.lines: list[object] = []

    def on_wait(self, fence: Fence, target: StreamName) -> None:
        if fence.rule is Rule.SHARDS_WRITTEN and fence.what == "main weights":
            self.lines.append("a wait")

    def on_collective(self, stream: StreamName, collective: Collective, tag: int | None, *_: object) -> None:
        if collective is Collective.ALL_GATHER:
            self.lines.append(tag)


@on_ranks(2)
def test_forward_and_backward_wait_once_each_for_main_weights(context: RankContext) -> None:
    """Before their first all-gathers, which cast the weights."""
    with simulated_device():
        model: Any = sharded("unequal layers", BF16)
        stack_step(model, context.call(0))
        engine, order = engine_inside(model), _Order()
        with engine.streams.observed_by(order):
            stack_step(model, context.call(1))
    units = engine.order.order
    assert [line for line in order.lines if line in ("a wait", *units)] == ["a wait", *units, "a wait", 3, 2, 1]


@on_ranks(2)
def test_memory_of_a_backward_that_fails_outlives_its_reductions(context: RankContext) -> None:
    """As where batches are tried until one fits: the model goes, and nobody waits for the reductions under way."""
    with simulated_device() as device:
        model: Any = sharded("micro-batches", BF16)
        with pytest.raises(Trouble), failing(model.layers[0]):
            stack_step(model, context.call(0))
        engine = engine_inside(model)
        flats = [flat for unit in engine.units for flat in unit.trained]
        memory = {flat.main_grads.untyped_storage().data_ptr() for flat in flats}
        memory |= {flat.scratch.untyped_storage().data_ptr() for flat in flats}
        memory.discard(0)  # of units that are not reduced
        assert len(memory) > 2
        comm = engine.streams.device_stream(StreamName.COMM)
        del model, engine, flats
        gc.collect()
        assert all(comm in device.kept[address] for address in memory)


class _OnSide(torch.autograd.Function):
    """``x @ weight.T`` on a stream of its own, backward too, as autograd has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, device: SimulatedDevice, side: SimulatedStream) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.streams = device, side
        with _aside(device, side, x):
            out = x @ weight.T
        device.record_stream(out, device.current_stream(CPU))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        device, side = ctx.streams
        x, weight = ctx.saved_tensors
        with _aside(device, side, grad):
            grad_x = grad @ weight
        device.record_stream(grad_x, device.current_stream(CPU))
        with device.stream(side):  # as a node of its own makes it: no stream waits for it before the end of backward
            grad_weight = grad.T @ x
        return grad_x, grad_weight, None, None


@contextlib.contextmanager
def _aside(device: SimulatedDevice, side: SimulatedStream, given: Tensor) -> Iterator[None]:
    current = device.current_stream(CPU)
    device.record_stream(given, side)
    side.wait_stream(current)
    with device.stream(side):
        yield
    current.wait_stream(side)


class _SharedExpert(nn.Module):
    """A layer that computes half of its output on another stream."""

    def __init__(self, device: SimulatedDevice, side: SimulatedStream, *, side_first: bool) -> None:
        super().__init__()
        self.near, self.aside = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM, bias=False)
        self.streams, self.side_first = (device, side), side_first

    def forward(self, x: Tensor) -> Tensor:
        parts = [lambda: _OnSide.apply(x, self.aside.weight, *self.streams), lambda: self.near(x)]
        first, second = parts if self.side_first else reversed(parts)
        return first() + second()  # type: ignore[no-any-return]


@on_ranks(1, 2)
@pytest.mark.parametrize("slots", [{}, ALL_SLOTS])
def test_gradients_that_come_on_other_streams_are_in_time(context: RankContext, slots: dict[str, Any]) -> None:
    """As layers with a stream for shared experts have them: rules 3 and 4 hold."""
    with simulated_device() as device, checking_streams(device) as checker:
        side = SimulatedStream()
        layers = [_SharedExpert(device, side, side_first=number % 2 == 0) for number in range(4)]
        model: Any = StreamShard(nn.Sequential(*layers), precision=BF16, **slots)
        optimizer = adamw(model)
        with checker.of(model):
            for number in range(3):
                if number != 1:
                    with model.no_sync():
                        stack_step(model, context.call(2 * number))
                stack_step(model, context.call(2 * number + 1))
                optimizer.step()
                optimizer.zero_grad()
    assert checker.leaves == {side, device.compute}


@on_ranks(2)
def test_hooks_step_behind_reductions_that_another_stream_waits_for(context: RankContext) -> None:
    """Autograd comes to a layer on the stream that has made its output; hooks run on the backward's."""
    need = graph_hooks.need_weights
    with simulated_device() as device, checking_streams(device) as checker:
        side = SimulatedStream()

        def need_aside(*args: Any) -> None:
            with _aside(device, side, torch.empty(0)):
                need(*args)

        model = sharded("unequal layers", BF16)
        step_in_hooks(model)
        with checker.of(model), mock.patch.object(graph_hooks, "need_weights", need_aside):
            for number in range(2):
                stack_step(model, context.call(number))


def change_after_skipping(model: Any, context: RankContext) -> None:
    """Weights change after a forward that has skipped layers, which were all-gathered all the same."""
    with torch.no_grad():
        for route in (range(5), [0], [0]):
            model.route = route
            model(vector_batch(0, context.rank))
            for param in model.parameters():
                param.mul_(0.5)


@on_ranks(2)
def test_weights_may_change_after_a_forward_that_has_skipped_layers(context: RankContext) -> None:
    """All-gathers read the main weights; nothing in the pass waits for those of layers that did not run."""
    for precision in (FP32, BF16):
        with simulated_device() as device, checking_streams(device) as checker:
            model = StreamShard(RoutedStack(5), precision=precision)
            with checker.of(model):
                change_after_skipping(model, context)


def test_host_copies_hold_what_was_there_at_the_call() -> None:
    """On whatever stream the caller is, who writes to the pieces next; another thread reads the copies."""
    with simulated_device() as device, checking_streams(device) as checker:
        side = SimulatedStream()
        with device.stream(side):
            pieces = [TensorPiece("weight", (4,), 0, torch.ones(4)) for _ in range(60)]
            finish = start_copies(pieces, CPU)
            for piece in pieces:
                piece.data.zero_()
        sources = [weakref.ref(piece.data) for piece in pieces]
        del pieces, piece
        assert all(source() is not None for source in sources)  # their memory is not reused before it is copied
        assert not checker.found
        with device.stream(device.host):
            assert all(copy.data.eq(1.0).all() for copy in finish())
        assert all(source() is None for source in sources)


@on_ranks(2)
def test_a_step_is_not_captured_in_a_graph(context: RankContext) -> None:
    """It says what can be; afterwards training goes on."""
    with simulated_device() as device:
        model = sharded("unequal layers", BF16)
        device.is_capturing = True
        with pytest.raises(ShardingError, match='captured in a device graph.*mode="reduce-overhead"'):
            stack_step(model, context.call(0))
        device.is_capturing = False
        stack_step(model, context.call(0))

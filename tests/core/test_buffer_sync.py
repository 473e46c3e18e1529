"""Buffers are on every rank, at every moment, what they are under DistributedDataParallel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from streamshard import CommunicationError, RankMismatchError, ShardingError, StreamShard
from tests.compare import assert_same, full_weights
from tests.counts import counted_collectives
from tests.faults import case
from tests.models import DIM, NormStack, Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, sgd, sharded_model
from tests.scenarios import over_sockets

SEED = 5
Program = Callable[[nn.Module, RankContext, Callable[[], None]], None]


class _DDP(DistributedDataParallel):
    """As that of torch 2.13: what a forward has saved of a buffer may be sent anew before its backward."""

    def _sync_buffers(self) -> None:
        with torch.autograd._unsafe_preserve_version_counter(tuple(self.modules_buffers)):
            super()._sync_buffers()


def buffers_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of a model's buffers, complex ones as pairs of real numbers."""
    copies = {name: value.detach().clone() for name, value in getattr(model, "module", model).named_buffers()}
    return {name: torch.view_as_real(value) if value.is_complex() else value for name, value in copies.items()}


def assert_like_ddp(
    context: RankContext, build: Callable[[], nn.Module], program: Program, **settings: Any
) -> nn.Module:
    """Run `program` on DDP and on StreamShard; what it notes of the buffers is the same on each rank, each time."""
    noted: list[list[dict[str, Tensor | None]]] = []
    models = []
    for wrap in (
        partial(_DDP, find_unused_parameters=True),
        lambda module: StreamShard(module, precision=FP32, **settings),
    ):
        torch.manual_seed(SEED)
        model = wrap(build())
        notes: list[dict[str, Tensor | None]] = []
        torch.manual_seed(SEED + context.rank)
        program(model, context, lambda model=model, notes=notes: notes.append(buffers_of(model)))  # type: ignore[misc]
        notes.append(buffers_of(model))
        noted.append(notes)
        models.append(model)
    for number, (wanted, found) in enumerate(zip(*noted, strict=True)):
        assert_same(found, wanted, f"buffers at note {number} on rank {context.rank}")
    ddp, sharded = models
    weights = full_weights(sharded)
    trained = {name: param.detach() for name, param in getattr(ddp, "module", ddp).named_parameters()}
    assert_same({name: weights[name] for name in trained}, trained, "weights")
    return sharded


def train(model: nn.Module, context: RankContext, note: Callable[[], None], steps: int = 4) -> None:
    """Ordinary steps; notes buffers between forward and loss and after each step."""
    optimizer = sgd(getattr(model, "module", model))
    for step in range(steps):
        out = model(vector_batch(step, context.rank))
        note()
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        note()


def with_evaluation(model: nn.Module, context: RankContext, note: Callable[[], None]) -> None:
    """Evaluation uses rank 0's statistics, with and without gradients."""
    for number in range(2):
        train(model, context, note, steps=2)
        model.eval()
        with torch.set_grad_enabled(number > 0):
            model(vector_batch(50, context.rank))
            note()
            model(vector_batch(51, context.rank))
        model.train()


def in_training_mode_without_gradients(model: nn.Module, context: RankContext, note: Callable[[], None]) -> None:
    """Statistics are gathered anew over data: each rank goes on with its own."""
    train(model, context, note, steps=2)
    for number in range(3):
        with torch.no_grad():
            model(vector_batch(50 + number, context.rank))
        note()
    train(model, context, note, steps=2)


def with_no_sync(model: nn.Module, context: RankContext, note: Callable[[], None]) -> None:
    """Micro-batches go on with this rank's statistics."""
    optimizer = sgd(getattr(model, "module", model))
    for step in range(3):
        with model.no_sync():  # type: ignore[operator]
            for number in range(2):
                model(vector_batch(3 * step + number, context.rank)).square().mean().backward()
                note()
        model(vector_batch(3 * step + 2, context.rank)).square().mean().backward()
        note()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_batch_norm_buffers_equal_ddps_at_every_moment(context: RankContext) -> None:
    """This rank's own between forward and loss, rank 0's when a forward begins and the last one has trained."""
    for program in (in_training_mode_without_gradients, with_no_sync):
        with case(program.__name__):
            assert_like_ddp(context, NormStack, program)
    with over_sockets():
        assert_like_ddp(context, NormStack, with_evaluation)


@on_ranks(4)
def test_replicas_get_the_buffers_of_rank_0_of_all(context: RankContext) -> None:
    assert_like_ddp(context, NormStack, with_evaluation, mesh=init_device_mesh("cpu", (2, 2)))


class Kinds(Stack):
    """Buffers of many kinds, all of which forward changes, on each rank in another way."""

    def __init__(self) -> None:
        super().__init__()
        for dtype in (torch.int64, torch.float64, torch.bfloat16, torch.bool, torch.complex64):
            self.register_buffer(str(dtype).replace(".", "_"), torch.zeros(3, dtype=dtype))
        self.register_buffer("sliced", torch.zeros(4, 6)[:, ::2])
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("nothing", None)
        self.layers[1].register_buffer("inside", torch.zeros(2))
        self.layers[2].register_buffer("tied", self.layers[1].inside)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for _, buffer in self.named_buffers():
                buffer.copy_(buffer + (x.flatten()[: buffer.numel()].view(buffer.shape) > 0))
        return super().forward(x)


class Table(Stack):
    """A table beside the weights; `change` is what forward does to the model in each call."""

    def __init__(self, change: Callable[[Any, Tensor], None] | None = None, *, is_persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(DIM), persistent=is_persistent)
        self.table: Tensor
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x * self.table)
        if self.change is not None:
            self.change(self, x.detach())
        return y


def in_place(model: Any, x: Tensor) -> None:
    model.table.lerp_(x.mean(0), 0.5)


def by_assignment(model: Any, x: Tensor) -> None:
    model.table = x.mean(0)


def only_on_rank_1(model: Any, x: Tensor) -> None:
    if dist.get_rank() == 1:
        in_place(model, x)


@on_ranks(2)
def test_buffers_of_every_kind_equal_ddps(context: RankContext) -> None:
    """Dtypes, strides, two names for one; changed in place or by assignment."""
    for change in (by_assignment, only_on_rank_1):
        with case(change.__name__):
            assert_like_ddp(context, lambda change=change: Table(change), train)  # type: ignore[misc]
    model: Any = assert_like_ddp(context, Kinds, with_evaluation)
    assert model.layers[2].tied is model.layers[1].inside


@on_ranks(2)
def test_a_non_persistent_buffer_stays_each_ranks_own(context: RankContext) -> None:
    """From the first forward on: a cache may have another form on each rank, or exist on one of them only."""

    def change(model: Any, x: Tensor) -> None:
        model.table = torch.full((1,) * context.rank + (DIM,), 1.0 + context.rank)
        if context.rank == 1:
            model.register_buffer("cache", x.clone(), persistent=False)

    model = Table(change, is_persistent=False)
    model.table += context.rank
    sharded: Any = StreamShard(model, precision=FP32)
    assert torch.equal(sharded.table, torch.ones(DIM))
    for step in range(3):
        sharded(vector_batch(step, context.rank)).sum().backward()
        assert torch.equal(sharded.table, torch.full((1,) * context.rank + (DIM,), 1.0 + context.rank))
    assert hasattr(sharded, "cache") == (context.rank == 1)


@on_ranks(2)
@pytest.mark.parametrize("change", ["differs", "gone"])
def test_state_that_ranks_cannot_share_raises_on_all(context: RankContext, change: str) -> None:
    """In the next forward. Rank 1, or all ranks that have changed the buffer, name it, with advice."""

    def change_it(model: Any, x: Tensor) -> None:
        if context.rank and change == "gone":
            del model.table
        elif change == "differs":
            model.table = torch.ones((1,) * (1 + context.rank))

    now = "is gone" if change == "gone" else "has another shape or dtype by now"
    advice = r"model.register_buffer\('table', model.table, persistent=False\)"
    names_it = context.rank or change == "differs"
    named = rf"'table' was \(16,\) torch.float32, and {now}.*{advice}"
    message = named if names_it else "rank 1 has failed: buffer 'table'"
    kind = ShardingError if names_it else CommunicationError
    model: Any = StreamShard(Table(change_it), precision=FP32)
    model(vector_batch(0, context.rank)).sum().backward()
    with pytest.raises(kind, match=message):
        model(vector_batch(1, context.rank)).sum().backward()


@on_ranks(2)
def test_a_buffer_that_a_forward_gives_its_shape_needs_a_forward_before_sharding(context: RankContext) -> None:
    def shape_it(model: Any, x: Tensor) -> None:
        if model.table.numel() > 1:
            model.table = torch.ones(1)

    for runs_before in (True, False):  # a refusal ends the exchanges of all ranks
        model: Any = Table(shape_it)
        if runs_before:
            model(vector_batch(0, context.rank))
        model = StreamShard(model, precision=FP32)
        refused = pytest.raises(ShardingError, match=r"run one before StreamShard\(model\)")
        model(vector_batch(0, context.rank)).sum().backward()
        with contextlib.nullcontext() if runs_before else refused:
            model(vector_batch(1, context.rank)).sum().backward()


@on_ranks(2)
def test_a_buffer_that_cannot_be_kept_equal_is_refused(context: RankContext) -> None:
    """By name, on both ranks, with nothing changed."""
    expanded = torch.zeros(3, 1).expand(3, 4)
    for message, buffer in (("sparse_coo.*plain attribute", torch.eye(3).to_sparse()), (r"expanded.*clone", expanded)):
        model: Any = Stack()
        model.layers[1].register_buffer("graph", buffer)
        with pytest.raises(ShardingError, match=f"buffer 'layers.1.graph' is not dense .*{message}"):
            StreamShard(model)
        del model.layers[1].graph
        StreamShard(model)
    model = Stack()
    model.register_buffer("state", torch.zeros(2 + context.rank))
    with pytest.raises(RankMismatchError, match=r"rank 0 has buffer state \(2,\).*rank 1 has buffer state \(3,\)"):
        StreamShard(model)
    assert not isinstance(model, StreamShard)
    model = Stack()
    model.register_buffer("row", model.layers[0].linear.weight.detach()[3])
    with pytest.raises(ShardingError, match=r"'layers.0.linear.weight' and 'row' share memory"):
        StreamShard(model)


def talk(model: nn.Module, context: RankContext, steps: int = 1) -> dict[str, int]:
    """How often training steps send buffers, objects and votes."""
    with counted_collectives(model) as counts:
        for step in range(steps):
            model(vector_batch(step, context.rank)).sum().backward()
    names = ("broadcast_", "allgather_", "allreduce_", "_allgather_base_")
    return {name: counts[name] for name in names if name in counts}


@on_ranks(2)
def test_evaluation_and_passes_inside_no_sync_send_no_statistics(context: RankContext) -> None:
    """After the first ones, which send what training has changed."""
    model = sharded_model(NormStack)
    talk(model, context)
    with torch.no_grad():
        model(vector_batch(0, context.rank))
        with counted_collectives(model) as counts:
            model(vector_batch(0, context.rank))
    assert "broadcast_" not in counts
    talk(model, context)
    with model.no_sync():
        assert talk(model, context) == {"broadcast_": 2}  # numbers of batches are integers
        assert talk(model, context, 2) == {}

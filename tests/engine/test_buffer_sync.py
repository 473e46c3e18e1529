"""Buffers are on every rank, at every moment, what they are under DistributedDataParallel."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from streamshard import CommunicationError, Precision, RankMismatchError, ShardingError, StreamShard
from tests.models import NormStack, Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, assert_same, counted_collectives, ddp_of, full_weights, sgd
from tests.scenarios import over_sockets

SEED = 5
DIM = 16
Program = Callable[[nn.Module, RankContext, Callable[[], None]], None]


def inner(model: nn.Module) -> Any:
    """The user's own model."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def buffers_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of a model's buffers, complex ones as pairs of real numbers."""
    copies = {name: value.detach().clone() for name, value in inner(model).named_buffers()}
    return {name: torch.view_as_real(value) if value.is_complex() else value for name, value in copies.items()}


def assert_like_ddp(
    context: RankContext,
    build: Callable[[], nn.Module],
    program: Program,
    **settings: Any,
) -> nn.Module:
    """Run `program` on DDP and on StreamShard; what it notes of the buffers is the same on each rank, each time.

    Args:
        context: the rank.
        build: makes the model.
        program: called with the model, the rank and a function that notes all buffers.
        **settings: for `StreamShard`.

    Returns:
        The sharded model.
    """
    noted: list[list[dict[str, Tensor | None]]] = []
    models = []
    for wrap in (ddp_of, lambda module: StreamShard(module, precision=FP32, **settings)):
        torch.manual_seed(SEED)
        model = wrap(build())
        notes: list[dict[str, Tensor | None]] = []
        torch.manual_seed(SEED + context.rank)
        program(model, context, lambda model=model, notes=notes: notes.append(buffers_of(model)))  # type: ignore[misc]
        notes.append(buffers_of(model))
        noted.append(notes)
        models.append(model)
    wanted, found = noted
    assert len(wanted) == len(found)
    for number, (theirs, ours) in enumerate(zip(wanted, found, strict=True)):
        assert_same(ours, theirs, f"buffers at note {number} on rank {context.rank}")
    ddp, sharded = models
    weights = full_weights(sharded)
    trained = {name: param.detach() for name, param in inner(ddp).named_parameters()}
    assert_same({name: weights[name] for name in trained}, trained, "weights")
    return sharded


def train(
    model: nn.Module,
    context: RankContext,
    note: Callable[[], None],
    steps: int = 4,
    after: Callable[[nn.Module, int], None] | None = None,
) -> None:
    """Ordinary steps; notes buffers between forward and loss and after each step."""
    optimizer = sgd(inner(model))
    for step in range(steps):
        out = model(vector_batch(step, context.rank))
        note()
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(inner(model), step)
        note()


# ---------------------------------------------------------------------------------------------- ways of training


def plainly(model: nn.Module, context: RankContext, note: Callable[[], None]) -> None:
    """The loop that everybody writes."""
    train(model, context, note)


def with_evaluation(model: nn.Module, context: RankContext, note: Callable[[], None]) -> None:
    """Evaluation uses rank 0's statistics."""
    for _ in range(2):
        train(model, context, note, steps=2)
        model.eval()
        with torch.no_grad():
            model(vector_batch(50, context.rank))
            note()
            model(vector_batch(51, context.rank))
        model.train()


def with_evaluation_that_has_gradients(model: nn.Module, context: RankContext, note: Callable[[], None]) -> None:
    """Somebody forgot no_grad."""
    train(model, context, note, steps=2)
    model.eval()
    for number in range(2):
        model(vector_batch(50 + number, context.rank))
        note()
    model.train()
    train(model, context, note, steps=2)


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
    optimizer = sgd(inner(model))
    for step in range(3):
        with model.no_sync():  # type: ignore[operator]
            for number in range(2):
                model(vector_batch(3 * step + number, context.rank)).square().mean().backward()
                note()
        model(vector_batch(3 * step + 2, context.rank)).square().mean().backward()
        note()
        optimizer.step()
        optimizer.zero_grad()


def with_frozen_statistics(model: nn.Module, context: RankContext, note: Callable[[], None]) -> None:
    """A submodule in eval() mode is sent all the same: rank 1 has written into it."""
    inner(model).norms[0].eval()
    train(model, context, note, steps=1)
    inner(model).norms[0].running_mean += context.rank
    train(model, context, note, steps=2)


def with_an_error(model: nn.Module, context: RankContext, note: Callable[[], None]) -> None:
    """A batch of the wrong width on all ranks."""
    train(model, context, note, steps=2)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.zeros(3, DIM + 1))
    note()
    train(model, context, note, steps=2)


@on_ranks(2)
@pytest.mark.parametrize(
    "program",
    [
        plainly,
        with_evaluation,
        with_evaluation_that_has_gradients,
        in_training_mode_without_gradients,
        with_no_sync,
        with_frozen_statistics,
        with_an_error,
    ],
)
def test_batch_norm_is_ddps_at_every_moment(context: RankContext, program: Program) -> None:
    """This rank's own between forward and loss, rank 0's when a forward begins and the last one has trained."""
    assert_like_ddp(context, NormStack, program)


@on_ranks(2)
def test_batch_norm_is_ddps_through_sockets(context: RankContext) -> None:
    """As through memory."""
    with over_sockets():
        assert_like_ddp(context, NormStack, with_evaluation)


@on_ranks(2)
def test_statistics_change_twice_where_a_layer_is_recomputed(context: RankContext) -> None:
    """As in torch."""

    class Recomputed(NormStack):
        def forward(self, x: Tensor) -> Tensor:
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = checkpoint(lambda x, layer=layer, norm=norm: norm(layer(x)), x, use_reentrant=False)
            out: Tensor = self.head(x)
            return out

    assert_like_ddp(context, Recomputed, plainly)


@on_ranks(2)
def test_two_forwards_under_one_backward_send_twice(context: RankContext) -> None:
    """In eval() mode, so that what the first graph has saved may be overwritten."""

    def twice(model: nn.Module, context: RankContext, note: Callable[[], None]) -> None:
        train(model, context, note, steps=2)
        model.eval()
        inner(model).norms[1].running_var += context.rank
        outs = []
        for number in range(2):
            outs.append(model(vector_batch(60 + number, context.rank)))
            note()
        sum(out.square().mean() for out in outs).backward()
        model.train()

    assert_like_ddp(context, NormStack, twice)


@on_ranks(2)
def test_a_call_of_a_part_leaves_buffers_alone(context: RankContext) -> None:
    """Statistics that a forward has left are this rank's until the next forward of the whole, whatever runs between."""

    class Predictor(NormStack):
        def __init__(self) -> None:
            super().__init__()
            self.predictor = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.predictor(super().forward(x))  # type: ignore[no-any-return]

    def program(model: nn.Module, context: RankContext, note: Callable[[], None]) -> None:
        for step in range(4):
            out = model(vector_batch(step, context.rank))
            with torch.no_grad():
                inner(model).predictor(out.detach())
            note()
            out.square().mean().backward()

    assert_like_ddp(context, Predictor, program)


@on_ranks(4)
def test_replicas_get_rank_0s(context: RankContext) -> None:
    """Those of all replicas."""
    assert_like_ddp(context, NormStack, with_evaluation, mesh=init_device_mesh("cpu", (2, 2)))


@on_ranks(2)
def test_every_rank_starts_from_its_own_only_until_the_first_forward(context: RankContext) -> None:
    """Without ``broadcast_weights``; and what is written between construction and the first forward."""
    for settings in ({"broadcast_weights": False}, {}):
        model = Kinds()
        model.count.fill_(10 + context.rank)
        sharded: Any = StreamShard(model, precision=FP32, **settings)
        assert int(sharded.count) == 10 + context.rank * (not settings.get("broadcast_weights", True))
        sharded.single.fill_(3.0 + context.rank)
        with torch.no_grad():
            sharded(vector_batch(0, context.rank))
        assert float(sharded.single) == 3.0 + 1.0 + context.rank
        assert int(sharded.count) == 10 + 1


# ---------------------------------------------------------------------------------------------- kinds of buffers


class Kinds(Stack):
    """Buffers of many kinds, all of which forward changes, on each rank by something else."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("single", torch.zeros(()))
        self.register_buffer("wide", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("narrow", torch.zeros(5, dtype=torch.bfloat16))
        self.register_buffer("flags", torch.zeros(7, dtype=torch.bool))
        self.register_buffer("waves", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("turned", torch.zeros(2, 3).t())
        self.register_buffer("sliced", torch.zeros(4, 6)[:, ::2])
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("nothing", None)
        self.register_buffer("trained", torch.zeros(2, requires_grad=True))
        self.layers[1].register_buffer("inside", torch.zeros(2))
        self.layers[2].register_buffer("tied", self.layers[1].inside)
        self.count: Tensor
        self.single: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 1]"""
        with torch.no_grad():
            self.count += 1
            self.single += x.mean().sign().abs() + dist.get_rank()
            for name, buffer in self.named_buffers():
                if buffer.dtype is torch.bool:
                    buffer.copy_(x.flatten()[: buffer.numel()] > 0)
                elif name not in ("count", "single"):
                    buffer.add_(x.flatten()[: buffer.numel()].view(buffer.shape))
        return super().forward(x)


@on_ranks(2, 3)
def test_buffers_of_every_kind_are_ddps(context: RankContext) -> None:
    """Dtypes, strides, none and no elements, gradients, two names for one; in the root and in units."""
    model: Any = assert_like_ddp(context, Kinds, with_evaluation)
    assert model.layers[2].tied is model.layers[1].inside
    assert model.trained.requires_grad
    assert model.trained.is_leaf


@on_ranks(2)
def test_one_buffer_under_two_names_stays_one(context: RankContext) -> None:
    """Also where `buffer_dtype` makes another tensor of it."""
    model: Any = StreamShard(Kinds(), precision=Precision(buffer_dtype=torch.float64))
    assert model.layers[2].tied is model.layers[1].inside
    assert model.layers[2].tied.dtype is torch.float64
    assert model.trained.requires_grad
    assert model.trained.is_leaf


class Table(Stack):
    """A table beside the weights.

    Args:
        change: what forward does to the model in each call.
        is_persistent: whether the table belongs to the state.
    """

    def __init__(self, change: Callable[[Any, Tensor], None] | None = None, *, is_persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(DIM), persistent=is_persistent)
        self.table: Tensor
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 1]"""
        y = super().forward(x * self.table)
        if self.change is not None:
            self.change(self, x.detach())
        return y


def in_place(model: Any, x: Tensor) -> None:
    """An average, say."""
    model.table.lerp_(x.mean(0), 0.5)


def by_assignment(model: Any, x: Tensor) -> None:
    """Another tensor each time."""
    model.table = x.mean(0)


def under_its_data(model: Any, x: Tensor) -> None:
    """The object stays, its memory does not."""
    model.table.data = x.mean(0)


def only_on_rank_1(model: Any, x: Tensor) -> None:
    """Which gets rank 0's back."""
    if dist.get_rank() == 1:
        in_place(model, x)


@on_ranks(2)
@pytest.mark.parametrize("change", [in_place, by_assignment, under_its_data, only_on_rank_1])
def test_state_that_forward_changes_is_ddps(context: RankContext, change: Callable[[Any, Tensor], None]) -> None:
    """However it is written."""
    assert_like_ddp(context, lambda: Table(change, is_persistent=True), plainly)


@on_ranks(2)
def test_a_buffer_that_is_not_saved_is_each_ranks_own(context: RankContext) -> None:
    """From the first forward on: a cache may have another length on each rank, or exist on one of them only."""

    def change(model: Any, x: Tensor) -> None:
        model.table = torch.full((DIM + context.rank,), 1.0 + context.rank)[:DIM]
        if context.rank == 1:
            model.register_buffer("cache", x.clone(), persistent=False)

    model = Table(change)
    model.table += context.rank
    sharded: Any = StreamShard(model, precision=FP32)
    assert torch.equal(sharded.table, torch.ones(DIM))
    for step in range(3):
        sharded(vector_batch(step, context.rank)).sum().backward()
        assert torch.equal(sharded.table, torch.full((DIM,), 1.0 + context.rank))
    assert hasattr(sharded, "cache") == (context.rank == 1)


def _other_shape(model: Any, x: Tensor) -> None:
    model.table = torch.zeros(2)


def _other_dtype(model: Any, x: Tensor) -> None:
    model.table = model.table.to(torch.float64)


def _sparse(model: Any, x: Tensor) -> None:
    model.table = torch.ones(DIM).to_sparse()


def _gone(model: Any, x: Tensor) -> None:
    del model.table


def _further(model: Any, x: Tensor) -> None:
    model.register_buffer("further", torch.zeros(2))


@on_ranks(2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other_shape, r"'table' was \(16,\) torch.float32 when .* has become \(2,\).*persistent=False"),
        (_other_dtype, r"'table' was \(16,\) torch.float32 when .* has become \(16,\) torch.float64"),
        (_sparse, r"'table' .*sparse_coo"),
        (_gone, r"'table' of the model's state is gone"),
        (_further, r"'further' was registered by a forward.*persistent=False"),
    ],
)
def test_state_that_ranks_cannot_share_raises_on_all(
    context: RankContext, change: Callable[[Any, Tensor], None], message: str
) -> None:
    """In the next forward, although rank 1 alone has changed it."""
    alone = (lambda *given: change(*given) if context.rank else None) if change is not _further else change
    model: Any = StreamShard(Table(alone, is_persistent=True), precision=FP32)
    model(vector_batch(0, context.rank)).sum().backward()
    error = CommunicationError if context.rank == 0 and change is not _further else ShardingError
    with pytest.raises(error, match=message):
        model(vector_batch(1, context.rank)).sum().backward()


@on_ranks(2)
def test_check_weights_compares_the_state_and_leaves_out_what_may_differ(context: RankContext) -> None:
    """Caches are each rank's own; so are statistics until the next forward takes rank 0's."""
    model: Any = StreamShard(NormStack(), precision=FP32)
    model.register_buffer("cache", torch.full((3,), float(context.rank)), persistent=False)
    model(vector_batch(0, context.rank)).square().mean().backward()
    model.check_weights()
    with torch.no_grad():
        model.eval()(vector_batch(0, context.rank))
    model.check_weights()
    model.norms[0].running_mean += context.rank == 1
    with pytest.raises(RankMismatchError, match=r"'norms.0.running_mean' is not the same.*\[1\]"):
        model.check_weights()


# ---------------------------------------------------------------------------------------------- at construction


def _sparse_coo() -> Tensor:
    return torch.eye(3).to_sparse()


def _sparse_csr() -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # "in beta state"
        return torch.eye(3).to_sparse_csr()


def _expanded() -> Tensor:
    return torch.zeros(3, 1).expand(3, 4)


def _quantized() -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # "deprecated"
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


@on_ranks(1, 2)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_sparse_coo, "sparse_coo.*plain attribute"),
        (_sparse_csr, "sparse_csr.*plain attribute"),
        (_quantized, "quantized"),
        (nn.parameter.UninitializedBuffer, "not initialised"),
        (_expanded, r"expanded.*clone\(\)"),
    ],
)
def test_a_buffer_that_cannot_be_kept_equal_is_refused(
    context: RankContext, make: Callable[[], Tensor], message: str
) -> None:
    """By name, with nothing changed."""
    model = Stack()
    model.layers[1].register_buffer("graph", make())
    with pytest.raises(ShardingError, match=f"buffer 'layers.1.graph' is .*{message}"):
        StreamShard(model)
    del model.layers[1].graph
    StreamShard(model)


@on_ranks(2)
def test_state_of_another_shape_is_refused(context: RankContext) -> None:
    """On both ranks, before anything is sharded."""
    model = Stack()
    model.register_buffer("state", torch.zeros(2 + context.rank))
    with pytest.raises(RankMismatchError, match=r"rank 0 has buffer state \(2,\).*rank 1 has buffer state \(3,\)"):
        StreamShard(model)
    assert not isinstance(model, StreamShard)


@on_ranks(1)
def test_a_buffer_in_a_parameters_memory_is_refused(context: RankContext) -> None:
    """It would keep what the weight was. Tensors that only share a file's memory are not that."""
    model = Stack()
    model.register_buffer("row", model.layers[0].linear.weight.detach()[3])
    with pytest.raises(ShardingError, match=r"parameter 'layers.0.linear.weight' and buffer 'row' share memory"):
        StreamShard(model)
    memory = torch.zeros(DIM * DIM + 4)
    model.layers[0].linear.weight.data = memory[: DIM * DIM].view(DIM, DIM)
    model.row = memory[DIM * DIM :]
    StreamShard(model)


# ---------------------------------------------------------------------------------------------- what it costs


def talk(model: nn.Module, context: RankContext, steps: int = 1) -> dict[str, int]:
    """How often training steps send buffers, objects and votes."""
    with counted_collectives(model) as counts:
        for step in range(steps):
            model(vector_batch(step, context.rank)).sum().backward()
    names = {"broadcast_": "buffers", "allgather_": "objects", "allreduce_": "votes"}
    names["_allgather_base_"] = "objects"  # torch 2.15
    return {what: counts[name] for name, what in names.items() if name in counts}


@on_ranks(2)
@pytest.mark.parametrize("over", ["memory", "sockets"])
def test_a_step_of_a_model_whose_buffers_are_tables_sends_nothing_for_them(context: RankContext, over: str) -> None:
    """No broadcast, no object and no vote, once the order of units is known."""
    with over_sockets() if over == "sockets" else contextlib.nullcontext():
        model: Any = StreamShard(Table(), precision=FP32)
    talk(model, context)
    assert talk(model, context, 5) == {}


@on_ranks(2)
def test_a_training_step_of_batch_norm_sends_one_message_and_others_none(context: RankContext) -> None:
    """Neither evaluation, after its first pass, nor passes inside no_sync."""
    model: Any = StreamShard(NormStack(), precision=FP32)
    talk(model, context)
    assert talk(model, context, 3) == {"buffers": 3}
    with torch.no_grad():
        model(vector_batch(0, context.rank))
        with counted_collectives(model) as counts:
            model(vector_batch(0, context.rank))
    assert "broadcast_" not in counts
    talk(model, context)
    with model.no_sync():
        assert talk(model, context) == {"buffers": 1}
        assert talk(model, context, 2) == {}


# ---------------------------------------------------------------------------------------------- uneven inputs


@on_ranks(2, 3)
@pytest.mark.parametrize("first_runs_out", [False, True])
def test_uneven_inputs_leave_statistics_as_ddp_does(context: RankContext, first_runs_out: bool) -> None:
    """Those of a rank that has inputs count."""

    def program(model: nn.Module, context: RankContext, note: Callable[[], None]) -> None:
        optimizer = sgd(inner(model))
        with Join([model], repeat=optimizer.step):  # type: ignore[list-item]
            for step in range(3 if (context.rank == 0) == first_runs_out else 7):
                model(vector_batch(step, context.rank)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        note()

    assert_like_ddp(context, lambda: Table(in_place, is_persistent=True), program)

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

from streamshard import Precision, RankMismatchError, ShardingError, StreamShard
from tests.models import Layer, NormStack, Stack, vector_batch
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
    """Where ranks do not vote through memory."""
    with over_sockets():
        assert_like_ddp(context, NormStack, with_evaluation)
        assert_like_ddp(context, Late, plainly)


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
        self.register_buffer("single", torch.zeros(()), persistent=False)
        self.register_buffer("wide", torch.zeros(3, dtype=torch.float64), persistent=False)
        self.register_buffer("narrow", torch.zeros(5, dtype=torch.bfloat16))
        self.register_buffer("flags", torch.zeros(7, dtype=torch.bool), persistent=False)
        self.register_buffer("waves", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("turned", torch.zeros(2, 3).t(), persistent=False)
        self.register_buffer("sliced", torch.zeros(4, 6)[:, ::2])
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("nothing", None)
        self.register_buffer("trained", torch.zeros(2, requires_grad=True), persistent=False)
        self.register_buffer("graphed", torch.zeros(2, requires_grad=True) * 1.0, persistent=False)
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


class OurKinds(Stack):
    """What DDP does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("short", torch.zeros(3, dtype=torch.int16))
        self.register_buffer("eighth", torch.zeros(3).to(torch.float8_e4m3fn), persistent=False)
        self.register_buffer("expanded", torch.zeros(1, 3, 1).expand(4, 3, 2), persistent=False)
        with torch.inference_mode():
            self.register_buffer("inferred", torch.zeros(3))
            self.register_buffer("table", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 1]"""
        value = float(x.sum())
        self.short += int(10 * value)
        self.eighth.copy_(torch.full((3,), value))
        self.expanded[0, :, 0] = value
        with torch.inference_mode():
            self.inferred.fill_(value)
            self.table.fill_(value)
        return super().forward(x)


@on_ranks(2, 3)
def test_buffers_of_every_kind_are_ddps(context: RankContext) -> None:
    """Dtypes, strides, none and no elements, gradients, two names for one; in the root and in units."""
    model: Any = assert_like_ddp(context, Kinds, with_evaluation)
    assert model.layers[2].tied is model.layers[1].inside
    assert model.trained.requires_grad
    assert model.trained.is_leaf


@on_ranks(2)
def test_buffers_that_ddp_does_not_take_are_rank_0s(context: RankContext) -> None:
    """Small integers, 8-bit floats, expanded ones (an element that stands for many is sent once), inference tensors."""
    model = StreamShard(OurKinds(), precision=FP32)
    for step in range(4):
        model(vector_batch(step, context.rank)).sum().backward()
    own = {name: value.double().clone() for name, value in model.named_buffers()}
    firsts = {name: value.clone() for name, value in own.items()}
    for value in firsts.values():
        dist.broadcast(value, 0)
    assert any(not torch.equal(own[name], firsts[name]) for name in own) == (context.rank > 0)
    hook = model.register_forward_pre_hook(lambda *_: own.update(buffers_of(model)))  # type: ignore[arg-type]
    with torch.no_grad():
        model(vector_batch(9, context.rank))
    hook.remove()
    for name, value in firsts.items():
        assert torch.equal(own[name].double(), value), name
    assert model.expanded.stride() == (0, 1, 0)  # type: ignore[operator]


@on_ranks(2)
def test_one_buffer_under_two_names_stays_one(context: RankContext) -> None:
    """Also where `buffer_dtype` makes another tensor of it."""
    model: Any = StreamShard(Kinds(), precision=Precision(buffer_dtype=torch.float64))
    assert model.layers[2].tied is model.layers[1].inside
    assert model.layers[2].tied.dtype is torch.float64
    assert model.trained.requires_grad
    assert model.trained.is_leaf


# ---------------------------------------------------------------------------------------------- what changes late


class Late(Stack):
    """A table that nobody saves and nothing changes, until something does.

    Args:
        change: what forward does to the model from its third call on.
    """

    def __init__(self, change: Callable[[Any, Tensor], None] | None = None) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(DIM), persistent=False)
        self.register_buffer("other", torch.ones(3), persistent=False)
        self.table: Tensor
        self.calls = 0
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 1]"""
        self.calls += 1
        y = super().forward(x * self.table)
        if self.change is not None and self.calls > 2:
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


def by_registering(model: Any, x: Tensor) -> None:
    """What transformers' dynamic rotary tables do."""
    model.register_buffer("table", x.mean(0), persistent=False)


def by_another_in_its_place(model: Any, x: Tensor) -> None:
    """As when the next one takes the memory of one that was deleted: as new as that was, and at its address."""
    memory = model.table.numpy()
    memory[:] = x.mean(0).numpy()
    model.table = torch.from_numpy(memory)


def only_on_rank_0(model: Any, x: Tensor) -> None:
    """The others get it."""
    if dist.get_rank() == 0:
        in_place(model, x)


def only_on_rank_1(model: Any, x: Tensor) -> None:
    """Which gets rank 0's back."""
    if dist.get_rank() == 1:
        in_place(model, x)


def now_and_then(model: Any, x: Tensor) -> None:
    """Every third call."""
    if model.calls % 3 == 0:
        in_place(model, x)


@on_ranks(2)
@pytest.mark.parametrize(
    "change",
    [
        in_place,
        by_assignment,
        under_its_data,
        by_registering,
        by_another_in_its_place,
        only_on_rank_0,
        only_on_rank_1,
        now_and_then,
    ],
)
def test_a_buffer_that_forward_changes_late_is_ddps(
    context: RankContext, change: Callable[[Any, Tensor], None]
) -> None:
    """In the very next forward."""
    assert_like_ddp(context, lambda: Late(change), lambda *given: train(*given, steps=14))


@on_ranks(2)
@pytest.mark.parametrize("change", [in_place, by_assignment, only_on_rank_1])
def test_a_buffer_that_is_changed_between_steps_is_ddps(
    context: RankContext, change: Callable[[Any, Tensor], None]
) -> None:
    """From the fifth step on, every other one."""

    def after(model: nn.Module, step: int) -> None:
        if step > 3 and step % 2:
            change(model, vector_batch(step, context.rank))

    assert_like_ddp(context, Late, lambda *given: train(*given, steps=10, after=after))


@on_ranks(2)
def test_what_has_no_version_is_noticed_in_the_first_training_pass(context: RankContext) -> None:
    """Statistics that are not saved, which batch norm's kernel writes; an average that is written through ``.data``."""

    class Unversioned(NormStack):
        def __init__(self) -> None:
            super().__init__()
            for norm in self.norms:
                for name in ("running_mean", "running_var", "num_batches_tracked"):
                    norm.register_buffer(name, norm._buffers[name], persistent=False)
            self.register_buffer("average", torch.zeros(DIM), persistent=False)
            self.average: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.average.data.lerp_(x.detach().mean(0), 0.5)
            return super().forward(x)

    assert_like_ddp(context, Unversioned, with_evaluation)


@on_ranks(2)
def test_a_buffer_that_is_registered_in_forward_is_ddps(context: RankContext) -> None:
    """On all ranks, beside one that was there before; deleted again later."""

    def change(model: Any, x: Tensor) -> None:
        model.table = None if model.calls % 2 else x.mean(0)
        if model.calls < 6:
            model.register_buffer("late", x.mean(0), persistent=model.calls % 2 == 0)
        elif hasattr(model, "late"):
            del model.late

    class Registering(Late):
        def forward(self, x: Tensor) -> Tensor:
            """[rows, 16] -> [rows, 1]"""
            if self.table is None:
                self.table = torch.ones(DIM)
            return super().forward(x)

    assert_like_ddp(context, lambda: Registering(change), lambda *given: train(*given, steps=9))


@on_ranks(2)
@pytest.mark.parametrize("is_persistent", [True, False])
def test_a_buffer_that_grows_on_all_ranks_is_ddps(context: RankContext, is_persistent: bool) -> None:
    """A history, another tensor of another shape each time."""

    class Growing(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("history", torch.zeros(1), persistent=is_persistent)
            self.history: Tensor

        def forward(self, x: Tensor) -> Tensor:
            """[rows, 16] -> [rows, 1]"""
            self.history = torch.cat([self.history, x.detach().mean().view(1)])
            return super().forward(x)

    model: Any = assert_like_ddp(context, Growing, plainly)
    assert model.history.shape == (5,)


# ---------------------------------------------------------------------------------------------- what differs in shape


class Cached(Layer):
    """A table as long as the longest batch that this rank has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0), persistent=False)
        self.table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 16]"""
        if len(self.table) < len(x):
            self.table = torch.arange(len(x), dtype=x.dtype) + 1 + 100 * dist.get_rank()
        return super().forward(x) * (self.table[: len(x), None] % 100)


class CachedStack(NormStack):
    """Layers with such tables, and batch norm beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Cached() for _ in range(3))


@on_ranks()
@pytest.mark.parametrize(("world_size", "longer", "sockets"), [(2, 0, False), (2, 1, True), (3, 1, False)])
def test_a_cache_of_another_length_is_each_ranks_own(context: RankContext, longer: int, sockets: bool) -> None:
    """And what is beside it is rank 0's still; where lengths are the same again, the cache is too."""
    with over_sockets() if sockets else contextlib.nullcontext():
        model: Any = StreamShard(CachedStack(), precision=FP32)
    rows = [4, 4, 6, 6, 9, 9, 9]
    for step, here in enumerate(rows):
        count = here + 3 * (context.rank == longer and step < 4)
        if step == 4:
            count = 9
        model(torch.randn(count, DIM)).square().mean().backward()
        wanted = max(rows[: step + 1]) + 3 * (context.rank == longer) if step < 4 else 9
        for layer in model.layers:
            assert (layer.table % 100).tolist() == list(range(1, wanted + 1))
            assert int(layer.table[0]) // 100 == (context.rank if step < 5 else 0)
        assert int(model.norms[0].num_batches_tracked) == step + 1
    model.eval()(torch.randn(2, DIM))
    statistics = model.norms[1].running_mean.clone()
    dist.broadcast(statistics, 0)
    assert torch.equal(statistics, model.norms[1].running_mean)


@on_ranks(2)
def test_a_cache_that_only_some_ranks_have_is_theirs(context: RankContext) -> None:
    """Registered in forward, on a path that only rank 1 takes."""

    def change(model: Any, x: Tensor) -> None:
        if context.rank == 1:
            model.register_buffer("cache", x.clone(), persistent=False)

    model: Any = StreamShard(Late(change), precision=FP32)
    for step in range(6):
        x = vector_batch(step, context.rank)
        model(x).sum().backward()
        if context.rank == 1 and step > 1:
            assert torch.equal(model.cache, x)
    assert hasattr(model, "cache") == (context.rank == 1)


@on_ranks(2)
def test_check_weights_leaves_out_what_may_differ(context: RankContext) -> None:
    """Caches of each rank's own, and statistics that the next forward takes from rank 0; a table is compared."""
    model: Any = StreamShard(CachedStack(), precision=FP32)
    model.register_buffer("angles", torch.ones(3), persistent=False)
    for _ in range(3):
        model(torch.randn(4 + 2 * context.rank, DIM)).square().mean().backward()
        model.check_weights()
    model.angles += context.rank == 1
    with pytest.raises(RankMismatchError, match=r"'angles' is not the same.*\[1\]"):
        model.check_weights()


def _other_shape(model: Any, x: Tensor) -> None:
    model.state = torch.zeros(2 + dist.get_rank())


def _other_dtype(model: Any, x: Tensor) -> None:
    model.state = model.state.to(torch.float64 if dist.get_rank() else torch.float32)


def _only_here(model: Any, x: Tensor) -> None:
    if dist.get_rank():
        model.register_buffer("state", torch.zeros(2))
    else:
        del model.state


def _sparse(model: Any, x: Tensor) -> None:
    if dist.get_rank():
        model.state = torch.eye(2).to_sparse()


@on_ranks(2)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (_other_shape, RankMismatchError, r"'state' is \(2,\) torch.float32 on rank 0 and \(3,\).*persistent=False"),
        (_other_dtype, RankMismatchError, r"'state' is \(2,\) torch.float32 on rank 0 and \(2,\) torch.float64"),
        (_only_here, RankMismatchError, r"'state' is missing on rank 0 and \(2,\)"),
        (_sparse, ShardingError, r"'state' on rank 1 .*sparse_coo"),
    ],
)
def test_state_that_ranks_cannot_share_raises_on_all(
    context: RankContext, change: Callable[[Any, Tensor], None], error: type[Exception], message: str
) -> None:
    """In the next forward, and again in the one after; once it is mended training goes on."""

    class Stateful(Late):
        def __init__(self) -> None:
            super().__init__(lambda model, x: change(model, x) if model.calls == 3 else None)
            self.register_buffer("state", torch.zeros(2))

    model: Any = StreamShard(Stateful(), precision=FP32)
    for step in range(3):
        model(vector_batch(step, context.rank)).sum().backward()
    for _ in range(2):
        with pytest.raises(error, match=message):
            model(vector_batch(3, context.rank))
    if hasattr(model, "state"):
        del model.state
    model.register_buffer("state", torch.full((2,), 1.0 + context.rank))
    model(vector_batch(3, context.rank)).sum().backward()
    assert model.state.tolist() == [1.0, 1.0]


# ---------------------------------------------------------------------------------------------- at construction


def _sparse_coo() -> Tensor:
    return torch.eye(3).to_sparse()


def _sparse_csr() -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # "in beta state"
        return torch.eye(3).to_sparse_csr()


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
def test_tables_that_never_change_are_not_sent(context: RankContext) -> None:
    """After the first passes nothing is said of them but one bit between hosts; and a review now and then."""
    model: Any = StreamShard(Late(), precision=FP32)
    assert talk(model, context, 5)["objects"] > 0
    assert talk(model, context, 3) == {}
    assert "objects" in talk(model, context)
    assert talk(model, context, 7) == {}
    with over_sockets():
        model = StreamShard(Late(), precision=FP32)
    talk(model, context, 5)
    assert talk(model, context, 3) == {"votes": 3}


@on_ranks(2)
def test_a_table_that_stops_changing_stays_at_home(context: RankContext) -> None:
    """Found by a review: whatever happened to it, it is equal everywhere by then."""
    model: Any = StreamShard(Late(in_place), precision=FP32)
    assert talk(model, context, 12)["buffers"] >= 9
    model.change = None
    for _ in range(40):
        talk(model, context)
    assert "buffers" not in talk(model, context, 5)


@on_ranks(2)
def test_a_table_that_the_first_forward_fills_stays_at_home(context: RankContext) -> None:
    """It is the same everywhere, so the first review leaves it out."""

    class Filling(Late):
        def forward(self, x: Tensor) -> Tensor:
            """[rows, 16] -> [rows, 1]"""
            if self.calls == 0:
                self.table = torch.full((DIM,), 2.0)
            return super().forward(x)

    model: Any = StreamShard(Filling(), precision=FP32)
    talk(model, context)
    assert "buffers" not in talk(model, context, 8)


@on_ranks(2)
def test_passes_that_do_not_train_send_nothing(context: RankContext) -> None:
    """Neither in evaluation, after its first pass, nor inside no_sync."""
    model: Any = StreamShard(NormStack(), precision=FP32)
    assert talk(model, context, 3)["buffers"] == 3
    with torch.no_grad():
        model(vector_batch(0, context.rank))
        with counted_collectives(model) as counts:
            model(vector_batch(0, context.rank))
    assert "broadcast_" not in counts
    talk(model, context)
    with model.no_sync():
        assert talk(model, context)["buffers"] == 1
        assert talk(model, context, 2) == {}


@on_ranks(2)
def test_a_model_without_buffers_says_nothing(context: RankContext) -> None:
    """As DDP, which looks once: buffers that come later are each rank's own."""
    model: Any = StreamShard(Stack(), precision=FP32)
    talk(model, context)
    model.register_buffer("own", torch.tensor(context.rank))
    assert talk(model, context) == {}
    assert int(model.own) == context.rank


# ---------------------------------------------------------------------------------------------- uneven inputs


@on_ranks(2, 3)
@pytest.mark.parametrize("first_runs_out", [False, True])
def test_uneven_inputs_leave_late_buffers_as_ddp_does(context: RankContext, first_runs_out: bool) -> None:
    """Those of a rank that has inputs count; one that has run out has nothing to say, but hears what is new."""

    def program(model: nn.Module, context: RankContext, note: Callable[[], None]) -> None:
        optimizer = sgd(inner(model))
        with Join([model], repeat=optimizer.step):  # type: ignore[list-item]
            for step in range(3 if (context.rank == 0) == first_runs_out else 7):
                model(vector_batch(step, context.rank)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        note()

    assert_like_ddp(context, lambda: Late(in_place), program)

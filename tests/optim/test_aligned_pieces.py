"""Pieces that are whole blocks or whole rows: optimizers that need those train as on the unsharded model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from streamshard import (
    Precision,
    StreamShard,
    export_safetensors,
    full_optimizer_state_dict,
    load_optimizer_state_dict,
    load_safetensors,
)
from streamshard.config import PieceAlignment
from streamshard.errors import ConfigError, RankMismatchError, ShardingError
from streamshard.inspect import engine_inside
from streamshard.optim import elementwise
from tests.models import Stack, TinyLM
from tests.ranks import RankContext, RankPool, on_ranks
from tests.reference import (
    EXACT,
    FP32,
    Call,
    adamw,
    assert_same,
    assert_trains_like_plain,
    full_grads,
    full_weights,
    lm_step,
    piece_of,
    stack_step,
)

WIDTHS = (24, 40, 56, 24)


def _stack() -> nn.Module:
    return Stack(WIDTHS)


# -- blocks -----------------------------------------------------------------------------------------------------------


@elementwise
class _BlockwiseAdam(Optimizer):
    """Moments in 8 bits with a scale for each block of elements, as torchao and bitsandbytes keep them.

    Like those, it leaves small tensors as they are.
    """

    BLOCK, LEAST = 32, 64

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is None:
                continue
            state = self.state.setdefault(param, {"step": 0})
            state["step"] += 1
            grad, moments = param.grad.reshape(-1), []
            for name, value, beta in (("m", grad, 0.9), ("v", grad.square(), 0.99)):
                moments.append(self._read(state, name, grad.numel()).lerp(value, 1 - beta))
                self._write(state, name, moments[-1])
            scale = (1 - 0.99 ** state["step"]) ** 0.5 / (1 - 0.9 ** state["step"])
            param.view(-1).sub_(0.01 * scale * moments[0] / (moments[1].sqrt() + 1e-3))

    def _read(self, state: dict[str, Any], name: str, numel: int) -> Tensor:
        if name not in state:
            return torch.zeros(numel)
        if state[name].dtype is torch.float32:
            return state[name]
        return (state[name].float() * state[name + "_scale"][:, None] / 127).view(-1)[:numel]

    def _write(self, state: dict[str, Any], name: str, value: Tensor) -> None:
        state[name] = value
        if value.numel() >= self.LEAST:
            blocks = nn.functional.pad(value, (0, -value.numel() % self.BLOCK)).view(-1, self.BLOCK)
            state[name + "_scale"] = blocks.abs().amax(1).clamp(min=1e-12)
            state[name] = (blocks / state[name + "_scale"][:, None] * 127).round().to(torch.int8)


def _train_both(build: Callable[[], nn.Module], optimizer: Callable[[Any], Optimizer], **settings: Any) -> Any:
    """The same batch on all ranks, whose number is a power of two: the mean of gradients is no rounding away."""
    torch.manual_seed(3)
    plain = build()
    model: Any = StreamShard(copy.deepcopy(plain), precision=FP32, **settings)
    steps = [(each, optimizer(each.parameters())) for each in (plain, model)]
    for number in range(4):
        for each, stepped in steps:
            _batch(each, number)
            stepped.step()
            stepped.zero_grad()
    return plain, model


def _batch(model: nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    model(torch.randn(8, WIDTHS[0], generator=generator)).square().mean().backward()


@on_ranks(2, 4)
def test_blockwise_moments_are_those_of_the_unsharded_model(context: RankContext) -> None:
    """To the bit, where no block is cut; else they are others."""
    plain, model = _train_both(_stack, _BlockwiseAdam, align_pieces_to=64)
    assert_same(full_weights(model), dict(plain.state_dict()), "weights", EXACT)
    plain, model = _train_both(_stack, _BlockwiseAdam)
    weights = full_weights(model)
    assert any(not torch.equal(weights[name], value) for name, value in plain.state_dict().items())


@on_ranks(2, 4)
def test_pieces_begin_where_blocks_do(context: RankContext) -> None:
    """What `local_ranges` says is what parameters hold."""
    whole = _stack().state_dict()
    model: Any = StreamShard(_stack(), precision=FP32, align_pieces_to=16)
    whole = full_weights(model)
    for name, param in model.named_parameters():
        local = model.local_ranges()[name]
        assert local.start % 16 == 0
        assert local.stop % 16 == 0 or local.stop == whole[name].numel()
        assert torch.equal(param.detach().flatten(), whole[name].flatten()[local.start : local.stop])
        assert piece_of(param).shape == (*[1] * (whole[name].ndim - 1), local.numel)


# -- rows -------------------------------------------------------------------------------------------------------------


class _ByRow(Optimizer):
    """RMSprop with one mean square for each row, of what has rows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is None:
                continue
            squares = param.grad.square()
            if param.ndim > 1:
                squares = squares.mean(dim=tuple(range(1, param.ndim)), keepdim=True)
                longest = torch.linalg.vector_norm(param.grad, float("inf"), dim=-1, keepdim=True)
                squares = squares + longest.square() / 10 if param.ndim == 2 else squares
            state = self.state[param]
            state["mean"] = state.get("mean", torch.zeros_like(squares)).lerp(squares, 0.1)
            param.sub_(0.01 * param.grad / (state["mean"].sqrt() + 1e-3))
            param.sub_(0.001 * (1 / (state["mean"] + 1)) * param.grad)


class _Pictures(nn.Module):
    """Convolutions, of rows with several dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(4, 4, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), 4, -1)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        out: Tensor = self.head(x.mean(-1))
        return out


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("build", [_stack, _Pictures])
def test_statistics_of_rows_are_those_of_the_unsharded_model(
    context: RankContext, build: Callable[[], nn.Module]
) -> None:
    """Where pieces are whole rows; else the first step raises."""
    plain, model = _train_both(build, _ByRow, align_pieces_to="row")
    assert_same(full_weights(model), dict(plain.state_dict()), "weights")
    if context.world_size == 2:
        with pytest.raises(ShardingError, match=r"of the gradient of '.*': this rank has one piece"):
            _train_both(build, _ByRow)


@on_ranks(2, 3)
def test_pieces_have_the_shape_of_rows(context: RankContext) -> None:
    """Parameters and gradients; and what is kept for them."""
    model: Any = StreamShard(_stack(), precision=FP32, align_pieces_to="row")
    optimizer = torch.optim.AdamW(model.parameters())
    _batch(model, 0)
    whole, grads = full_weights(model), full_grads(model)
    ranges = model.local_ranges()
    for name, param in model.named_parameters():
        rows = whole[name].flatten(1) if whole[name].ndim > 1 else whole[name][:, None]
        first, last = ranges[name].start // rows.shape[1], ranges[name].stop // rows.shape[1]
        assert torch.equal(param.detach(), whole[name][first:last])
        assert param.grad.shape == param.shape == whole[name].shape
        wanted = grads[name]
        assert wanted is not None
        assert torch.equal(param.grad.as_subclass(Tensor), wanted[first:last])
    optimizer.step()
    for param, values in optimizer.state.items():
        assert values["exp_avg"].shape == piece_of(param).shape


@on_ranks(2)
def test_gradients_written_back_have_rows(context: RankContext) -> None:
    """Those that came up inside of `summon_full_params` too."""
    model: Any = StreamShard(_stack(), precision=FP32, align_pieces_to="row")
    with model.summon_full_params(writeback=True, with_grads=True):
        for param in model.parameters():
            param.grad = torch.full_like(param, 2.0)
    for param in model.parameters():
        if param.ndim > 1:
            rows, columns = piece_of(param).shape
            assert torch.equal(piece_of(param.grad.sum(1)), torch.full((rows,), 2.0 * columns))


class Pair(nn.Module):
    """Two weights, of which two ranks have one each."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.one @ self.other


@on_ranks(2)
def test_rows_are_put_together_with_numbers_of_the_same_rows(context: RankContext) -> None:
    """A rank has others of another weight."""
    pair: Any = StreamShard(nn.Sequential(Pair(), Pair()), precision=FP32, align_pieces_to="row")[0]
    assert [piece_of(each).shape[0] for each in (pair.one, pair.other)] == [8 * (1 - context.rank), 8 * context.rank]
    assert (pair.one / pair.one.norm(dim=1, keepdim=True)).square().sum().item() == pytest.approx(8.0)
    vector = nn.utils.parameters_to_vector([pair.one.detach(), pair.other.detach()])
    pair.one.grad = vector[:64].view(8, 8)
    assert float(pair.one.grad.norm(dim=1).sum()) == pytest.approx(pair.one.norm(dim=1).sum().item())
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(pair.parameters()), pair.parameters())
    assert float((pair.one.norm(dim=1, keepdim=True).detach() * pair.one.detach()).norm()) > 0.0
    with pytest.raises(ShardingError, match=r"'0\.(one|other)' and '0\.(one|other)'"):
        pair.one / pair.other.norm(dim=1, keepdim=True)


@on_ranks(2)
def test_only_what_stays_within_rows_is_answered(context: RankContext) -> None:
    """Numbers of rows are pieces too: their sum is of all ranks. Columns are cut."""
    model: Any = StreamShard(Stack((16, 16, 16)), precision=FP32, align_pieces_to="row")
    stack_step(model, Call(0, 0, 1, 1.0))
    whole = full_grads(model)
    for name, param in model.named_parameters():
        grad, wanted = param.grad, whole[name]
        assert wanted is not None
        if grad.ndim < 2:
            with pytest.raises(ShardingError, match="of the gradient"):
                grad.sum(0)
            continue
        assert float(grad.square().sum(1).sum()) == pytest.approx(float(wanted.square().sum()))
        assert float((grad * 2).abs().amax(-1).norm()) == pytest.approx(float((wanted * 2).abs().amax(1).norm()))
        assert float((grad / grad.norm(dim=1, keepdim=True)).norm()) == pytest.approx(
            float((wanted / wanted.norm(dim=1, keepdim=True)).norm())
        )
        param.grad = grad.as_subclass(Tensor) * 3  # the user's own
        own = dict(model.named_parameters())[name].grad
        assert float(copy.deepcopy(own).square().sum(1).sum()) == pytest.approx(float(9 * wanted.square().sum()))
        for refused in (
            lambda g: g.sum(0),
            lambda g: g.mean((0, 1)),
            lambda g: g.t().sum(1),
            lambda g: g.T.sum(-1),
            lambda g: torch.linalg.vector_norm(g, dim=0),
            lambda g: g.flatten().sum(0),
            lambda g: g.max(1),
        ):
            with pytest.raises(ShardingError, match="of the gradient"):
                refused(grad)


@on_ranks(2)
def test_a_square_of_rows_has_none_when_it_is_turned(context: RankContext) -> None:
    """Its shape is what it was."""
    model: Any = StreamShard(TinyLM(), precision=FP32, align_pieces_to="row")
    lm_step(model, Call(0, 0, 1, 1.0))
    squares = [param.grad for param in model.parameters() if param.ndim == 2 and len(set(piece_of(param).shape)) == 1]
    heard: list[Any] = [None] * context.world_size
    dist.all_gather_object(heard, len(squares))
    assert sum(heard), "there is nothing to see"
    for grad in squares:
        assert grad.sum(1).shape == grad.shape[:1]
        for turned in (grad.t(), grad.T, grad.transpose(0, 1).abs()):
            with pytest.raises(ShardingError, match="of the gradient"):
                turned.sum(1)


class Cube(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.weight**2).sum()


@on_ranks(2, 3)
def test_statistics_of_blocks_of_rows_are_of_rows(context: RankContext) -> None:
    """Several numbers for each row, of which rows are asked for again, and written."""
    model: Any = StreamShard(nn.Sequential(Cube(), Cube()), precision=FP32, align_pieces_to="row")
    whole = full_weights(model)["0.weight"]
    sums, wanted = model[0].weight.detach().sum(2), whole.sum(2)
    assert sums.shape == (8, 4)
    assert [float(row.sum()) for row in sums] == pytest.approx([float(row.sum()) for row in wanted], abs=1e-5)
    assert float(sums.sum(1)[5]) == pytest.approx(float(wanted.sum(1)[5]), abs=1e-5)
    sums[5], wanted[5] = 0.0, 0.0
    assert float(sums.norm()) == pytest.approx(float(wanted.norm()))


@on_ranks(2)
def test_whole_tensors_are_cut_for_what_is_as_it_was_cut(context: RankContext) -> None:
    """For a transposed piece of rows, of the same shape, their rows would be others."""
    model: Any = StreamShard(nn.Sequential(Cube(), Cube()), precision=FP32, align_pieces_to="row")
    weight, whole = model[0].weight.detach(), torch.randn(8, 4, 4)
    assert piece_of(weight).shape == (4, 4, 4)
    rows = whole.chunk(2)[context.rank]
    assert torch.equal((weight * whole).as_subclass(torch.Tensor), weight.as_subclass(torch.Tensor) * rows)
    with pytest.raises(ShardingError, match="whole weight"):
        weight.transpose(1, 2) * whole.transpose(1, 2)


# -- everything else --------------------------------------------------------------------------------------------------

ALIGNMENTS: list[PieceAlignment] = [24, "row"]


@on_ranks(2, 3)
@pytest.mark.parametrize("pieces", ALIGNMENTS)
@pytest.mark.parametrize("slots", [2, "all"])
def test_a_transformer_trains_as_ever(context: RankContext, pieces: PieceAlignment, slots: Any) -> None:
    """Gradients are collected, and lie where their weights do."""
    model: Any = assert_trains_like_plain(
        context, TinyLM, lm_step, optimizer=adamw, align_pieces_to=pieces, weight_slots=slots, grad_slots=slots
    )
    report = model.memory_report()
    assert dict(report.held_bytes) == dict(report.formula_bytes)
    layouts = [segment.layout for segment in engine_inside(model).segments]
    assert report.padded_numel == sum(layout.padded_numel for layout in layouts) >= report.numel


def _state_of(context: RankContext, pieces: PieceAlignment) -> tuple[dict[str, Tensor], Any]:
    torch.manual_seed(4)
    model: Any = StreamShard(_stack(), precision=FP32, align_pieces_to=pieces)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(3):
        _batch(model, number)
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model), full_optimizer_state_dict(model, optimizer)


def _resumed(context: RankContext, pieces: PieceAlignment, weights: dict[str, Tensor], state: Any) -> Any:
    model: Any = StreamShard(_stack(), precision=FP32, align_pieces_to=pieces)
    model.load_state_dict(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    load_optimizer_state_dict(model, optimizer, state if context.rank == 0 else None)
    found = full_weights(model), full_optimizer_state_dict(model, optimizer)
    own = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(own)
    model.load_state_dict(model.state_dict())
    with model.summon_full_params(writeback=True):
        for param in model.parameters():
            param.data.mul_(2.0)
    for name, weight in full_weights(model).items():
        assert torch.equal(weight, weights[name] * 2)
    return found


@pytest.mark.parametrize(("before", "after"), [("row", 1), (1, "row"), ("row", 64), (64, "row")])
def test_state_moves_between_alignments_and_numbers_of_ranks(
    ranks: RankPool, before: PieceAlignment, after: PieceAlignment
) -> None:
    """What is collected depends on neither."""
    weights, state = ranks(3).run(_state_of, before)[0]
    again, collected = ranks(2).run(_resumed, after, weights, state)[0]
    assert_same(again, weights, "weights", EXACT)
    assert list(collected["state"]) == list(state["state"])
    for number, values in state["state"].items():
        assert_same(collected["state"][number], values, f"state of {number}", EXACT)


@on_ranks(3)
@pytest.mark.parametrize("pieces", ALIGNMENTS)
def test_exports_do_not_depend_on_it(context: RankContext, pieces: PieceAlignment, tmp_path: Path) -> None:
    """Written with one alignment, read with another."""
    torch.manual_seed(5)
    model: Any = StreamShard(_stack(), precision=Precision(), align_pieces_to=pieces)
    export_safetensors(model, tmp_path)
    torch.manual_seed(6)
    other: Any = StreamShard(_stack(), precision=Precision())
    load_safetensors(other, tmp_path)
    assert_same(full_weights(other), full_weights(model), "weights", EXACT)
    load_safetensors(model, tmp_path)
    assert_same(full_weights(other), full_weights(model), "weights", EXACT)


@on_ranks(1)
@pytest.mark.parametrize("pieces", [0, -1, 1.5, True, "rows", None])
def test_alignments_that_mean_nothing_are_refused(context: RankContext, pieces: Any) -> None:
    """By name."""
    with pytest.raises(ConfigError, match="align_pieces_to="):
        StreamShard(Stack(), align_pieces_to=pieces)


@on_ranks(4)
def test_padding_that_would_double_the_model_is_refused(context: RankContext) -> None:
    """On all ranks, with nothing changed; and ranks must want the same."""
    model = Stack()
    with pytest.raises(ConfigError, match=r"align_pieces_to=4096 would pad the model's 1,\d+ elements to \d+,\d+ on 4"):
        StreamShard(model, align_pieces_to=4096)
    assert not isinstance(model, StreamShard)
    with pytest.raises(RankMismatchError, match="align_pieces_to"):
        StreamShard(model, align_pieces_to=16 + context.rank)
    dist.barrier()

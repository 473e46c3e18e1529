"""What training scripts do around forward and backward: accumulation, clipping, groups, schedulers, `zero_grad`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from streamshard import Precision, StreamShard
from streamshard.optim import elementwise
from tests.models import Stack, TinyLM, next_token_loss, token_batch, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    EXACT,
    FP32,
    Call,
    adamw,
    assert_same,
    assert_trains_like_plain,
    counted_collectives,
    full_grads,
    full_weights,
    lm_step,
    piece_of,
    sgd,
    stack_step,
)

# ---------------------------------------------------------------------------------------------- accumulation


def _micro(model: nn.Module, call: Call, number: int, of: int) -> Tensor:
    out = model(vector_batch(call.step * 10 + number, call.rank, rows=2 + number))
    return call.backward(out.square().mean() / of)


def _no_sync_but_last(model: Any, call: Call) -> Tensor:
    """DDP's idiom: all but the last micro-batch inside `no_sync`."""
    total = torch.zeros(())
    for number in range(3):
        with model.no_sync() if number < 2 and isinstance(model, StreamShard) else contextlib.nullcontext():
            total = total + _micro(model, call, number, 3)
    return total


def _one_no_sync_for_all_but_last(model: Any, call: Call) -> Tensor:
    """One `no_sync` around several micro-batches."""
    with model.no_sync() if isinstance(model, StreamShard) else contextlib.nullcontext():
        total = _micro(model, call, 0, 3) + _micro(model, call, 1, 3)
    return total + _micro(model, call, 2, 3)


def _switch(model: Any, call: Call) -> Tensor:
    """FSDP2's idiom: `set_requires_gradient_sync`."""
    total = torch.zeros(())
    for number in range(3):
        if isinstance(model, StreamShard):
            model.set_requires_gradient_sync(number == 2)
        total = total + _micro(model, call, number, 3)
    return total


def _without_no_sync(model: Any, call: Call) -> Tensor:
    """Accumulation the plain way: several backwards, no context."""
    return _micro(model, call, 0, 3) + _micro(model, call, 1, 3) + _micro(model, call, 2, 3)


def _forwards_first(model: Any, call: Call) -> Tensor:
    """All forwards inside `no_sync`, then all backwards."""
    with model.no_sync() if isinstance(model, StreamShard) else contextlib.nullcontext():
        losses = [model(vector_batch(call.step * 10 + i, call.rank)).square().mean() / 3 for i in range(2)]
        for loss in losses:
            call.backward(loss)
    return _micro(model, call, 2, 3)


def _evaluation_inside(model: Any, call: Call) -> Tensor:
    """An evaluation forward between micro-batches."""
    with model.no_sync() if isinstance(model, StreamShard) else contextlib.nullcontext():
        total = _micro(model, call, 0, 2)
        with torch.no_grad():
            model(vector_batch(call.step + 500, call.rank))
    return total + _micro(model, call, 1, 2)


ACCUMULATIONS: dict[str, Callable[[Any, Call], Tensor]] = {
    "no_sync for all but the last": _no_sync_but_last,
    "one no_sync for several": _one_no_sync_for_all_but_last,
    "set_requires_gradient_sync": _switch,
    "without no_sync": _without_no_sync,
    "forwards first": _forwards_first,
    "evaluation inside": _evaluation_inside,
}


@on_ranks(1, 2)
@pytest.mark.parametrize("how", ACCUMULATIONS)
def test_gradients_accumulate_over_micro_batches(context: RankContext, how: str) -> None:
    """The sum over micro-batches of the mean over ranks, however it is written."""
    assert_trains_like_plain(context, Stack, ACCUMULATIONS[how], checked=(0, 2))


@on_ranks(2)
@pytest.mark.parametrize("how", ["no_sync for all but the last", "without no_sync"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_with_both_kinds_of_zero_grad(context: RankContext, how: str, set_to_none: bool) -> None:
    """Nothing of the step before is left, whichever way gradients were cleared."""
    assert_trains_like_plain(context, Stack, ACCUMULATIONS[how], set_to_none=set_to_none, optimizer=adamw)


@on_ranks(2)
def test_a_parameter_used_in_the_first_micro_batch_only(context: RankContext) -> None:
    """Its gradient from inside `no_sync` is averaged although the last micro-batch does not touch it."""

    class Skipping(Stack):
        skip = False

        def forward(self, x: Tensor) -> Tensor:
            for layer in list(self.layers)[1 if self.skip else 0 :]:
                x = layer(x)
            out: Tensor = self.head(x)
            return out

    def step(model: Any, call: Call) -> Tensor:
        model.skip = False
        with model.no_sync() if isinstance(model, StreamShard) else contextlib.nullcontext():
            total = _micro(model, call, 0, 2)
        model.skip = True
        return total + _micro(model, call, 1, 2)

    assert_trains_like_plain(context, Skipping, step, checked=(0, 2))


@on_ranks(2)
def test_accumulation_gathers_less_inside_no_sync(context: RankContext) -> None:
    """Weights that are still in their slots are not sent again; outside `no_sync` they might have changed."""
    model = StreamShard(Stack(), precision=FP32)
    traffic = []
    for inside in (False, True):
        for _ in range(2):
            stack_step(model, Call(0, context.rank, 2, 1.0))
        with model.no_sync() if inside else contextlib.nullcontext():
            stack_step(model, Call(1, context.rank, 2, 1.0))
            with counted_collectives(model) as counts:
                stack_step(model, Call(2, context.rank, 2, 1.0))
        traffic.append(sum(counts.values()))
    assert traffic[1] < traffic[0]


@on_ranks(2)
def test_gradients_are_not_cleared_by_the_next_forward(context: RankContext) -> None:
    """Only the user clears gradients: a step later they have added up."""

    def keep(model: nn.Module) -> Optimizer:
        optimizer = sgd(model)
        optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
        return optimizer

    assert_trains_like_plain(context, Stack, stack_step, optimizer=keep)


@on_ranks(2)
def test_zero_grad_of_the_model_and_of_the_optimizer(context: RankContext) -> None:
    """Either clears the same gradients."""
    model = StreamShard(Stack(), precision=FP32)
    optimizer = adamw(model)
    for clear in (model.zero_grad, optimizer.zero_grad):
        for set_to_none in (True, False):
            stack_step(model, Call(0, context.rank, 2, 1.0))
            clear(set_to_none=set_to_none)
            left = [p.grad for p in model.parameters()]
            assert all(grad is None if set_to_none else not grad.any() for grad in left)  # type: ignore[union-attr]


# ---------------------------------------------------------------------------------------------- clipping

# A training has four steps.
EACH_STEP = (0, 1, 2)
NORMS = [2.0, 1.0, 3.0, math.inf]


def clipped(
    clips: Sequence[Callable[[Any], Tensor]], norms: list[tuple[str, Tensor]]
) -> Callable[[nn.Module], Optimizer]:
    """SGD that clips before each step, with each of `clips` in turn, and notes the norm."""

    def make(model: nn.Module) -> Optimizer:
        optimizer = sgd(model)
        step = optimizer.step
        turns = itertools.cycle(clips)

        def clip_and_step() -> None:
            norms.append(("sharded" if isinstance(model, StreamShard) else "plain", next(turns)(model)))
            step()

        optimizer.step = clip_and_step  # type: ignore[method-assign,assignment]
        return optimizer

    return make


def _assert_norms_equal(norms: list[tuple[str, Tensor]], clips: bool) -> None:
    plain = [float(norm) for kind, norm in norms if kind == "plain"]
    sharded = [float(norm) for kind, norm in norms if kind == "sharded"]
    assert len(plain) == len(sharded) == len(EACH_STEP)
    assert sharded == pytest.approx(plain, rel=1e-5)
    assert all(isinstance(norm, Tensor) and norm.shape == () for _, norm in norms)
    assert not clips or min(plain) > 0.01


def _assert_clips_like_plain(context: RankContext, clips: Sequence[Callable[[Any], Tensor]], *, bites: bool) -> None:
    norms: list[tuple[str, Tensor]] = []
    assert_trains_like_plain(
        context, TinyLM, lm_step, optimizer=clipped(clips, norms), checked=EACH_STEP, plain_everywhere=True
    )
    _assert_norms_equal(norms, bites)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("max_norm", [0.01, 1000.0])
def test_the_models_own_clipping_uses_the_global_norm(context: RankContext, max_norm: float) -> None:
    """`model.clip_grad_norm_` returns the norm over all ranks, of each kind, and clips as plain PyTorch does."""

    def clip(model: Any, norm_type: float) -> Tensor:
        if isinstance(model, StreamShard):
            found: Tensor = model.clip_grad_norm_(max_norm, norm_type)
            return found
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)

    clips = [functools.partial(clip, norm_type=norm_type) for norm_type in NORMS]
    _assert_clips_like_plain(context, clips, bites=max_norm < 1)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("foreach", [None, False])  # True is what None means here
def test_torchs_own_clipping_uses_the_global_norm(context: RankContext, foreach: bool | None) -> None:
    """`torch.nn.utils.clip_grad_norm_` on our parameters is no silently local clip, whichever the norm."""

    def clip(model: Any, norm_type: float) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type, foreach=foreach)

    clips = [functools.partial(clip, norm_type=norm_type) for norm_type in NORMS]
    _assert_clips_like_plain(context, clips, bites=True)


def _blocks_only(model: Any) -> Tensor:
    return nn.utils.clip_grad_norm_([p for n, p in model.named_parameters() if n.startswith("blocks.")], 0.01)


def _one_parameter(model: Any) -> Tensor:
    return nn.utils.clip_grad_norm_(model.head.weight, 0.01)


def _in_two_steps(model: Any) -> Tensor:
    total = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, total)
    return total


def _twice(model: Any) -> Tensor:
    nn.utils.clip_grad_norm_(model.parameters(), 0.02)
    return nn.utils.clip_grad_norm_(model.parameters(), 0.015)


@on_ranks(2, 3)
def test_torchs_clipping_of_parts_of_the_model(context: RankContext) -> None:
    """Any subset of the parameters has a global norm of its own; norm and scaling may be apart, or come twice."""
    _assert_clips_like_plain(context, [_blocks_only, _one_parameter, _in_two_steps, _twice], bites=True)


@on_ranks(2)
def test_clipping_by_value_works_element_by_element(context: RankContext) -> None:
    """`clip_grad_value_` needs no norm."""

    def clip(model: Any) -> Tensor:
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        return torch.zeros(())

    assert_trains_like_plain(context, TinyLM, lm_step, optimizer=clipped([clip], []))


@on_ranks(2)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_seen_by_all_ranks(context: RankContext, value: float) -> None:
    """One bad element on one rank's piece: every rank's norm says so."""
    model: Any = StreamShard(TinyLM(), precision=FP32)
    lm_step(model, Call(0, context.rank, 2, 1.0))
    if context.rank == 1:
        biggest = max(model.parameters(), key=lambda p: piece_of(p).numel())
        piece_of(biggest.grad).view(-1)[0] = value
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    total = model.clip_grad_norm_(1.0)
    assert not torch.isfinite(total)


@on_ranks(2)
def test_clipping_without_any_gradient_gives_zero(context: RankContext) -> None:
    """Before the first backward."""
    model: Any = StreamShard(Stack(), precision=FP32)
    assert float(model.clip_grad_norm_(1.0)) == 0.0
    assert float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)) == 0.0


@on_ranks(2)
def test_the_users_own_norm_of_a_gradient_is_global_or_plainly_local(context: RankContext) -> None:
    """`grad.norm()` of each piece: squares summed over ranks must give the whole, or each rank has the whole."""
    model = StreamShard(Stack(), precision=FP32)
    stack_step(model, Call(0, context.rank, 2, 1.0))
    whole = {name: grad for name, grad in full_grads(model).items() if grad is not None}
    for name, p in model.named_parameters():
        assert p.grad is not None
        found = torch.as_tensor(float(p.grad.norm()))
        squares = found.square().clone()
        torch.distributed.all_reduce(squares)
        local = torch.allclose(squares.sqrt(), whole[name].norm(), rtol=1e-5)
        assert local or torch.allclose(found, whole[name].norm(), rtol=1e-5), name


# ---------------------------------------------------------------------------------------------- groups


def _by_name(model: nn.Module) -> Optimizer:
    named = list(model.named_parameters())
    plain = [p for name, p in named if "norm" in name or name.endswith("bias")]
    decayed = [p for name, p in named if not ("norm" in name or name.endswith("bias"))]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": plain, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def _by_dims(model: nn.Module) -> Optimizer:
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = [p for p in named.values() if p.dim() >= 2]
    plain = [p for p in named.values() if p.dim() < 2]
    assert decayed and plain
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.5}, {"params": plain, "weight_decay": 0.0}], lr=1e-2, eps=1e-3
    )


def _by_layer(model: Any) -> Optimizer:
    groups = [{"params": list(block.parameters()), "lr": 1e-3 * (1 + i)} for i, block in enumerate(model.blocks)]
    rest = [p for name, p in model.named_parameters() if not name.startswith("blocks.")]
    return torch.optim.AdamW([*groups, {"params": rest, "lr": 2e-3}], eps=1e-3)


def _each_its_own(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW([{"params": [p]} for p in model.parameters()], lr=1e-2, eps=1e-3)


@on_ranks(2)
@pytest.mark.parametrize("groups", [_by_name, _by_dims, _by_layer, _each_its_own])
def test_parameter_groups(context: RankContext, groups: Callable[[nn.Module], Optimizer]) -> None:
    """No decay for norms and biases, chosen by name or by `p.ndim`; a learning rate for each layer."""
    assert_trains_like_plain(context, TinyLM, lm_step, optimizer=groups)


@on_ranks(2)
def test_two_optimizers_for_two_parts(context: RankContext) -> None:
    """One steps every time, the other every second time."""

    @elementwise
    class Both(Optimizer):
        def __init__(self, model: nn.Module) -> None:
            parameters = list(model.named_parameters())
            self.often = torch.optim.SGD([p for n, p in parameters if n.startswith("blocks.")], lr=0.05)
            self.seldom = torch.optim.AdamW(
                [p for n, p in parameters if not n.startswith("blocks.")], lr=1e-2, eps=1e-3
            )
            self.count = 0
            super().__init__([p for _, p in parameters], {})

        def step(self) -> None:  # type: ignore[override]
            self.count += 1
            self.often.step()
            if self.count % 2 == 0:
                self.seldom.step()
                self.seldom.zero_grad()

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.often.zero_grad(set_to_none)

    assert_trains_like_plain(context, TinyLM, lm_step, optimizer=Both)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["cosine", "lambda", "one cycle", "plateau"])
def test_learning_rate_schedulers(context: RankContext, kind: str) -> None:
    """Schedulers change the optimizer's groups, and warm-up starts at zero."""

    def make(model: nn.Module) -> Optimizer:
        optimizer = adamw(model)
        schedulers = torch.optim.lr_scheduler
        scheduler: Any = {
            "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, T_max=5),
            "lambda": lambda: schedulers.LambdaLR(optimizer, lambda step: step / 3),
            "one cycle": lambda: schedulers.OneCycleLR(optimizer, max_lr=1e-2, total_steps=6, cycle_momentum=False),
            "plateau": lambda: schedulers.ReduceLROnPlateau(optimizer, patience=0),
        }[kind]()

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            scheduler.step(1.0) if kind == "plateau" else scheduler.step()

        optimizer.register_step_post_hook(after)
        return optimizer

    assert_trains_like_plain(context, TinyLM, lm_step, optimizer=make, steps=5, checked=(2, 4))


@on_ranks(2)
def test_an_optimizers_state_is_as_large_as_the_shards(context: RankContext) -> None:
    """Two moments of the shard's size each: 1/N of the model."""
    model = StreamShard(TinyLM(), precision=FP32)
    optimizer = adamw(model)
    lm_step(model, Call(0, context.rank, 2, 1.0))
    optimizer.step()
    for p in model.parameters():
        for name in ("exp_avg", "exp_avg_sq"):
            if p in optimizer.state:
                assert optimizer.state[p][name].shape == piece_of(p).shape


@on_ranks(2)
def test_an_optimizers_state_dict_loads_into_a_new_optimizer(context: RankContext) -> None:
    """Saved and restored on the same rank, training goes on the same."""
    torch.manual_seed(7)
    model = StreamShard(Stack(), precision=FP32)
    optimizer = adamw(model)

    def run(first: int, optimizer: Optimizer) -> dict[str, Tensor]:
        for number in range(first, first + 2):
            stack_step(model, Call(number, context.rank, 2, 1.0))
            optimizer.step()
            optimizer.zero_grad()
        return full_weights(model)

    run(0, optimizer)
    weights = [p.detach().clone() for p in model.parameters()]
    state = {"state": optimizer.state_dict()["state"], "param_groups": optimizer.state_dict()["param_groups"]}
    state["state"] = {
        index: {name: value.clone() for name, value in entry.items()} for index, entry in state["state"].items()
    }
    wanted = run(2, optimizer)
    with torch.no_grad():
        for p, value in zip(model.parameters(), weights, strict=True):
            p.copy_(value)
    other = adamw(model)
    other.load_state_dict(state)
    assert_same(run(2, other), wanted, "weights", EXACT)


# ---------------------------------------------------------------------------------------------- loss scaling


@on_ranks(1, 2)
def test_a_gradient_scaler_skips_the_step_on_all_ranks_or_raises(context: RankContext) -> None:
    """An overflow in one rank's piece: `torch.amp.GradScaler` must not let the others step alone."""
    model: Any = StreamShard(Stack(), precision=Precision(param_dtype=torch.float16, reduce_dtype=torch.float32))
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = full_weights(model)
    x = vector_batch(0, context.rank)
    scaler.scale(model(x).float().square().mean()).backward()
    if context.rank == context.world_size - 1:
        biggest = max(model.parameters(), key=lambda p: piece_of(p).numel())
        piece_of(biggest.grad).view(-1)[0] = math.inf
    try:
        scaler.step(optimizer)
        scaler.update()
    except RuntimeError as error:
        assert "scaler" in str(error).lower() or "GradScaler" in str(error)
        return
    assert scaler.get_scale() == 4.0
    assert_same(full_weights(model), before, "weights after a skipped step", EXACT)


@on_ranks(2)
def test_a_gradient_scaler_without_overflow_gives_the_right_step_or_raises(context: RankContext) -> None:
    """Scaling up and down again changes nothing."""
    torch.manual_seed(7)
    plain = Stack()
    torch.manual_seed(7)
    model: Any = StreamShard(Stack(), precision=FP32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer, plain_optimizer = sgd(model), sgd(plain)
    for number in range(3):
        for rank in range(2):
            stack_step(plain, Call(number, rank, 2, 0.5))
        scaler.scale(model(vector_batch(number, context.rank)).square().mean()).backward()
        try:
            scaler.unscale_(optimizer)
        except RuntimeError as error:
            assert "GradScaler" in str(error)
            return
        assert_same(full_grads(model), full_grads(plain), "unscaled gradients")
        scaler.step(optimizer)
        scaler.update()
        plain_optimizer.step()
        optimizer.zero_grad(), plain_optimizer.zero_grad()
    assert_same(full_weights(model), full_weights(plain), "weights")


@on_ranks(2)
def test_a_loss_of_uneven_tokens_can_be_weighted_by_hand(context: RankContext) -> None:
    """Token-weighted means over ranks: the user scales the loss, the engine averages."""

    def step(model: nn.Module, call: Call) -> Tensor:
        tokens = token_batch(call.step, call.rank, rows=1 + call.rank)
        return call.backward(next_token_loss(model(tokens), tokens) * (1 + call.rank) / 3 * 2)

    assert_trains_like_plain(context, TinyLM, step)

"""Gradients of a sharded model are pieces: what is computed from them is of all ranks, or raises."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamshard import GradScaler, StreamShard
from streamshard.errors import ShardingError
from streamshard.unit.op_kinds import OpKind, kind_of
from streamshard.unit.sharded_tensor import ShardedTensor
from tests.models import Stack
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, Call, assert_same, full_grads, full_weights, stack_step


def _pair() -> tuple[Any, nn.Module]:
    """The same model sharded and plain, with the same gradients."""
    torch.manual_seed(3)
    plain = Stack()
    torch.manual_seed(3)
    model = StreamShard(Stack(), precision=FP32)
    for each in (plain, model):
        stack_step(each, Call(0, 0, 1, 1.0))
    return model, plain


def _grads(model: nn.Module) -> list[Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


# -- what comes of a gradient -----------------------------------------------------------------------------------------

# Of one gradient: a number.
NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda g: g.norm(),
    "norm of order 1": lambda g: g.norm(1),
    "largest norm": lambda g: torch.linalg.vector_norm(g, math.inf),
    "smallest norm": lambda g: torch.linalg.vector_norm(g, -math.inf),
    "norm of a product": lambda g: (g * 0.5).norm(),
    "norm of a sum": lambda g: torch.add(input=g, other=g.data).norm(),
    "norm, by keyword": lambda g: torch.norm(input=g, p=2),
    "norm in another dtype and shape": lambda g: g.double().flatten().norm().float(),
    "norm of a clamped copy": lambda g: g.clone().clamp_(-0.01, 0.01).norm(),
    "norm after foreach": lambda g: torch._foreach_mul([g], 3.0)[0].norm(),
    "norms of foreach": lambda g: torch._foreach_norm(list(torch._foreach_add([g, g], [g, g])))[1],
    "norm of noise and it": lambda g: (g + torch.zeros_like(g)).norm(),
    "norm of what is large": lambda g: g[g.abs() > 1e-2].norm(),
    "norm where": lambda g: torch.where(g > 0, g, -g).norm(),
    "sum": lambda g: g.sum(),
    "sum along no dimension": lambda g: g.sum(dim=None, keepdim=False, dtype=torch.float64),
    "count by norm": lambda g: g.norm(0),
    "sum of squares": lambda g: g.pow(2).sum(),
    "mean": lambda g: g.abs().mean(),
    "max": lambda g: g.max(),
    "largest": lambda g: g.abs().amax(),
    "min": lambda g: torch.min(g),
    "larger of two": lambda g: torch.max(g, -g).sum(),
    "any nan": lambda g: float(g.isnan().any()),
    "all finite": lambda g: float(torch.isfinite(g).all()),
    "positive ones": lambda g: float((g > 0).sum()),
    "count": lambda g: float(torch.count_nonzero(g)),
    "dot": lambda g: torch.dot(g.flatten(), 2 * g.flatten()),
    "equal": lambda g: float(torch.equal(g, 2 * g)),
    "size": lambda g: sum(g.shape) + g.numel() + len(g) + g.size(0) + g.dim() + g.nbytes + g.flatten().shape[0],
    "a row": lambda g: g[len(g) // 2].norm(),
    "rows": lambda g: g[1:].abs().sum() + g[1:].numel(),
    "rows of a mask": lambda g: (g[len(g) // 2 :] * _noise(g.shape)[len(g) // 2 :]).sum(),
    "rows of rows": lambda g: (g.flatten()[1:][2:-1] * _noise(g.shape).flatten()[3:-1]).norm(),
    "the last row": lambda g: g[-1].square().sum(),
    "some elements": lambda g: g.view(-1)[len(g) // 2 : 7].abs().sum(),
    "an element's text": lambda g: float(f"{g.flatten()[-1]:.9f}"),
    "of another's dtype": lambda g: g.to(torch.zeros(1, dtype=torch.float64)).norm() + g.type_as(g.double()).sum(),
    "others of its dtype": lambda g: (g + _noise(g.shape).double().type_as(g)).sum() + torch.ones(3).to(g).sum(),
    "an element": lambda g: g.flatten()[-1] * 3.0,
    "the largest of halves": lambda g: sum(half.max() for half in g.flatten().chunk(2)),
    "by rows": lambda g: sum(row.norm() for row in g.unbind()),
    "scaled by rows": lambda g: (g * torch.arange(len(g)).view(-1, *[1] * (g.ndim - 1))).abs().sum(),
    "a mask of columns": lambda g: (g * torch.arange(g.shape[-1])).square().sum(),
    "a whole mask": lambda g: g[_noise(g.shape) > 0.5].abs().sum(),
    "overwritten": lambda g: _in_place(
        g.clone(), lambda copied: copied.__setitem__(slice(len(g) // 2, None), 0.5)
    ).norm(),
    "rows overwritten, by numbers": lambda g: _in_place(g.clone(), lambda c: c.__setitem__(_last(c), 0.5)).norm(),
    "columns overwritten": lambda g: _in_place(g.clone(), lambda c: c.__setitem__((..., 0), 2.0)).norm(),
    "largest of counts": lambda g: float((g > -1.0).int().max()) + float((g > 100.0).max()) + float((g < 9).min()),
    "norm of 16 bits": lambda g: (30000.0 * (g.sign() + 2)).half().norm().isinf().float(),
    "mask of rows": lambda g: (g * (_noise(g.shape)[..., :1] > 0.5).expand_as(g)).norm(),
    "overwritten where": lambda g: _in_place(g.clone(), lambda copied: copied.__setitem__(copied > 0, 0.5)).norm(),
    "overwritten by others": lambda g: _in_place(
        g.clone(), lambda copied: copied.__setitem__(0, _noise(copied.shape[1:]))
    ).norm(),
    "with noise of its shape": lambda g: (g + _noise(g.shape)).norm(),
    "in its own shape": lambda g: (g.view(g.shape[0], -1).reshape(g.shape) - 0.5).view(g.numel()).norm(),
    "transposed": lambda g: (g.T + g.T).T.norm() if g.ndim == 2 else g.norm(),
    "with more dimensions": lambda g: (g[None] + g.unsqueeze(0)).squeeze(0).norm(),
    "close": lambda g: float(torch.allclose(g, g + 1e-12)),
}


@on_ranks(1, 2, 3)
def test_numbers_of_a_gradient_are_of_all_ranks(context: RankContext) -> None:
    """As of the whole one, on every rank, although ranks hold different and some no elements."""
    model, plain = _pair()
    for name, number in NUMBERS.items():
        for ours, theirs in zip(_grads(model), _grads(plain), strict=True):
            assert float(number(ours)) == pytest.approx(float(number(theirs)), rel=1e-5, abs=1e-7), name


def _last(grad: Tensor) -> Tensor:
    return torch.tensor([len(grad) - 1, 0])


def _noise(shape: torch.Size) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3))


# Of gradients and their norms: gradients.
NORMALISED: dict[str, Callable[[Tensor], Tensor]] = {
    "divided": lambda g: g / g.norm(),
    "multiplied": lambda g: torch.mul(g, g.norm(1)),
    "by a number": lambda g: (0.5 * g) / (g.norm() + 1e-6),
    "in place": lambda g: g.clone().div_(g.norm(math.inf)),
    "in place, in a list": lambda g: _in_place(g, lambda copied: torch._foreach_mul_([copied], g.norm())),
    "in a list": lambda g: torch._foreach_div([g], torch._foreach_norm([g])[0])[0],
    "by a list": lambda g: torch._foreach_div([g], torch._foreach_norm([g]))[0],
    "added": lambda g: torch.addcdiv(g, g, torch.linalg.vector_norm(g)),
    "between": lambda g: torch.lerp(g, -g, g.norm()),
    "bounded": lambda g: torch.minimum(g, g.norm() / 100),
    "filled": lambda g: g.clone().fill_(g.norm()),
    "copied": lambda g: g.clone().copy_(g.norm()),
    "powers": lambda g: g.abs().pow(g.norm().detach()),
    "of what was changed": lambda g: g / _in_place(g.norm(), lambda norm: norm.mul_(2.0).add_(1e-6)),
    "of what was looked at": lambda g: g / _in_place(g.norm(), lambda norm: f"{norm.item()} {norm}"),
    "of a norm as a number": lambda g: g * float(1 / g.norm()),
}


def _in_place(tensor: Tensor, change: Callable[[Tensor], object]) -> Tensor:
    change(tensor)
    return tensor


@on_ranks(2, 3)
def test_gradients_are_put_together_with_their_global_norms(context: RankContext) -> None:
    """Normalised gradients, adversarial perturbations."""
    model, plain = _pair()
    for name, of in NORMALISED.items():
        for ours, theirs in zip(_grads(model), _grads(plain), strict=True):
            found, wanted = of(ours), of(theirs)
            assert type(found) is ShardedTensor
            assert float(found.norm()) == pytest.approx(float(wanted.norm()), rel=1e-5), name
            assert float(found.sum()) == pytest.approx(float(wanted.sum()), rel=1e-4, abs=1e-5), name


@on_ranks(2)
def test_what_reads_a_norm_without_asking_gets_nan(context: RankContext) -> None:
    """What is nobody's to ask about it: its form."""
    model, _ = _pair()
    norm = _grads(model)[0].norm()
    assert norm.shape == () and norm.dtype == torch.float32 and not norm.requires_grad and hash(norm) == id(norm)
    assert math.isnan(torch.full((2,), norm)[0])
    assert math.isnan(norm.as_subclass(Tensor).item())
    assert math.isfinite(norm.item())


# Of two lists of gradients, of one model each: a number.
VECTORS: dict[str, Callable[[list[Tensor], list[Tensor]], Tensor]] = {
    "norm of all in one": lambda a, b: torch.cat([g.view(-1) for g in a]).norm(),
    "vector": lambda a, b: nn.utils.parameters_to_vector([x + y for x, y in zip(a, b, strict=True)]).norm(),
    "dot": lambda a, b: torch.cat([g.flatten() for g in a]).dot(torch.cat([g.flatten() for g in b])),
    "total norm": lambda a, b: nn.utils.get_total_norm(a),
    "total norm, one by one": lambda a, b: nn.utils.get_total_norm(a, norm_type=math.inf, foreach=False),
    "by hand": lambda a, b: sum((g.norm() ** 2 for g in a), torch.zeros(())).sqrt(),
}


# What torch's optimizers, scaler and clipping ask of each gradient in each step.
ASKED = ("device", "dtype", "grad_fn", "is_cuda", "is_leaf", "is_sparse", "layout", "ndim", "requires_grad", "shape")


@on_ranks(2)
def test_attributes_of_a_gradient_are_questions_or_pieces(context: RankContext) -> None:
    """What is no tensor is answered at once, as for a plain one; what is one stays a piece."""
    grad = _grads(_pair()[0])[0]
    piece = grad.as_subclass(Tensor)
    for name in ("T", "data", "mT", "real", *ASKED):
        getter = inspect.getattr_static(Tensor, name).__get__
        is_tensor = isinstance(getattr(piece, name), Tensor)
        wanted = {"T": OpKind.VIEW, "mT": OpKind.VIEW, "ndim": OpKind.FORM, "shape": OpKind.FORM}
        assert kind_of(getter) is wanted.get(name, OpKind.ELEMENTWISE if is_tensor else OpKind.QUESTION), name
        if is_tensor:
            assert type(getattr(grad, name)) is ShardedTensor, name
        elif name != "shape":
            assert getattr(grad, name) == getattr(piece, name), name


@on_ranks(2, 3)
def test_numbers_of_all_gradients_are_of_all_ranks(context: RankContext) -> None:
    """Gradients put one behind the other, and two such vectors together."""
    model, plain = _pair()
    ours, theirs = _grads(model), _grads(plain)
    for name, number in VECTORS.items():
        found, wanted = (float(number(grads, [g.abs() for g in grads])) for grads in (ours, theirs))
        assert found == pytest.approx(wanted, rel=1e-5), name


def _project(grads: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """PCGrad: what of `grads` points against `others` is taken away."""
    a, b = (torch.cat([g.flatten() for g in each]) for each in (grads, others))
    a = a - torch.dot(a, b) / b.norm() ** 2 * b
    parts, place = [], 0
    for grad in grads:
        parts.append(a[place : place + grad.numel()].view(grad.shape))
        place += grad.numel()
    assert sum(part.numel() for part in torch.split(a, [g.numel() for g in grads])) == place
    return parts


@on_ranks(2)
def test_projected_gradients_are_clipped_and_stepped_like_plain_ones(context: RankContext) -> None:
    """Flattened, projected on another vector, cut again, clipped."""
    model, plain = _pair()
    norms = []
    for each in (model, plain):
        grads = _grads(each)
        for param, part in zip(each.parameters(), _project(grads, [g.abs() for g in grads]), strict=True):
            param.grad = part
        norms.append(float(nn.utils.clip_grad_norm_(list(each.parameters()), 0.01)))
        torch.optim.SGD(each.parameters(), lr=1.0).step()
    assert norms[0] == pytest.approx(norms[1])
    assert_same(full_weights(model), dict(plain.state_dict()), "weights")


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "columns": lambda g: g[:, :3],
    "in the order of columns": lambda g: g.T.reshape(-1),
    "every other element": lambda g: g.view(-1)[::2],
    "sum along a dimension": lambda g: g.sum(-1),
    "norm along a dimension": lambda g: g.norm(dim=-1),
    "spectral norm": lambda g: torch.linalg.norm(g, 2),
    "nuclear norm": lambda g: torch.norm(g, "nuc"),
    "product of matrices": lambda g: g @ g.T,
    "outer product": lambda g: g.T * g,
    "softmax": lambda g: g.softmax(-1),
    "normalized": lambda g: nn.functional.normalize(g, dim=-1),
    "cumulative sum": lambda g: g.cumsum(-1),
    "sorted": lambda g: g.flatten().sort(),
    "quantile": lambda g: torch.quantile(g, 0.5),
    "standard deviation": lambda g: g.std(),
    "histogram": lambda g: torch.histc(g),
    "numpy": lambda g: g.numpy(),
    "list": lambda g: g.tolist(),
    "stacked": lambda g: torch.stack([g, g]),
    "beside others": lambda g: torch.cat([g.flatten(), torch.zeros(3)]),
    "more dimensions": lambda g: g * torch.ones(1, 16, 16),
    "a whole mask, transposed": lambda g: g.T * torch.ones(16, 16),
}


@on_ranks(2)
def test_what_would_be_of_one_piece_raises(context: RankContext) -> None:
    """By the operation's name, with what to do instead; the gradient is as it was."""
    model, _ = _pair()
    grad = model.layers[1].linear.weight.grad
    before = grad.as_subclass(Tensor).clone()
    for name, operation in REFUSED.items():
        try:
            with pytest.raises(ShardingError, match=r"of (a|the) gradient.*piece.*summon_full_params"):
                operation(grad)
        except BaseException as error:
            error.add_note(name)
            raise
        assert torch.equal(grad.as_subclass(Tensor), before), name


@on_ranks(1)
def test_one_rank_has_whole_gradients(context: RankContext) -> None:
    """Where nothing is a piece, everything works."""
    model, _ = _pair()
    for operation in REFUSED.values():
        operation(model.layers[1].linear.weight.grad)


@on_ranks(2)
def test_nan_in_one_piece_is_the_largest_element_everywhere(context: RankContext) -> None:
    """A backend's maximum may lose it."""
    model, _ = _pair()
    grad = model.layers[1].linear.weight.grad
    if context.rank == 1:
        grad.as_subclass(Tensor)[...] = math.nan
    assert math.isnan(grad.max())
    assert math.isnan(grad.norm(math.inf))
    assert math.isnan(model.clip_grad_norm_(1.0, math.inf))


# -- tensors of the user's own ----------------------------------------------------------------------------------------


def _clip(model: Any, way: str) -> Tensor:
    if way == "the model's":
        return model.clip_grad_norm_(0.5)  # type: ignore[no-any-return]
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=way == "torch's")


@on_ranks(2)
@pytest.mark.parametrize("way", ["torch's", "torch's, one by one", "the model's"])
def test_gradients_of_the_users_own_are_clipped_by_their_global_norm(context: RankContext, way: str) -> None:
    """Plain tensors put in their place; in some, or in all parameters."""
    model, plain = _pair()
    for every in (1, 2):
        norms = []
        for each in (model, plain):
            for number, param in enumerate(each.parameters()):
                if number % every == 0:
                    param.grad = torch.full_like(param, 0.3)
        norms = [float(_clip(model, way)), float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5))]
        assert norms[0] == pytest.approx(norms[1])
        assert_same(full_grads(model), full_grads(plain), "gradients")


@on_ranks(2)
def test_parameters_of_units_tell_what_is_a_piece_too(context: RankContext) -> None:
    """Taken from a layer, or a list of layers."""
    model, _ = _pair()
    for part in (model.layers[1], model.layers):
        for param in part.parameters():
            param.grad = torch.full_like(param, 0.3)
        assert {type(param.grad) for param in part.parameters()} == {ShardedTensor}


@on_ranks(2)
def test_the_users_own_tensors_know_what_they_are_once_they_are_gradients(context: RankContext) -> None:
    """Who keeps them may clip them without asking for ``.grad``."""
    model, plain = _pair()
    for each in (model, plain):
        params = list(each.parameters())
        optimizer = torch.optim.SGD(params, lr=0.1)
        grads = [torch.full(param.shape, 0.3) for param in params]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.add_(0.1)
        for grad in grads:
            grad.mul_(0.5 / grad.norm())
        assert all(param.grad is grad for param, grad in zip(params, grads, strict=True))
        optimizer.step()
    assert_same(full_weights(model), dict(plain.named_parameters()), "weights")


@on_ranks(2, 3)
def test_gradients_of_penalties_alone_are_clipped_by_their_global_norm(context: RankContext) -> None:
    """Autograd puts them there by itself, and adds up what it has of several terms."""
    model, plain = _pair()
    norms = []
    for each in (model, plain):
        each.zero_grad()
        params = list(each.parameters())
        (sum(p.square().sum() for p in params) + sum(p.abs().sum() for p in params)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(params, 0.5)))
    assert norms[0] == pytest.approx(norms[1])
    assert_same(full_grads(model), full_grads(plain), "gradients")


@on_ranks(2)
def test_a_scaler_sees_gradients_of_the_users_own_on_all_ranks(context: RankContext) -> None:
    """An overflow that only one rank's pieces hold skips the step on both."""
    model, _ = _pair()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    for param in params:
        param.grad = torch.full_like(param, math.inf if context.rank else 0.3)
    before = full_weights(model)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0
    assert_same(full_weights(model), before, "weights")


class _Closure:
    """One that is an object."""

    def __init__(self, call: Callable[[], float]) -> None:
        self._call = call

    def __call__(self) -> float:
        return self._call()


@on_ranks(2)
@pytest.mark.parametrize("kind", [functools.partial, _Closure], ids=["partial", "object"])
def test_closures_may_clip_in_the_first_step(context: RankContext, kind: Any) -> None:
    """What a closure does to gradients is not the optimizer's doing, whatever it is to Python."""
    model, plain = _pair()
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01, eps=1e-3)

        def closure(each: nn.Module = each, optimizer: Any = optimizer) -> float:
            optimizer.zero_grad()
            loss = stack_step(each, Call(1, 0, 1, 1.0))
            nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            return float(loss)

        optimizer.step(kind(closure))
    assert_same(full_weights(model), dict(plain.state_dict()), "weights")


@on_ranks(2)
def test_a_closure_reduces_what_waits(context: RankContext) -> None:
    """Gradients that wait in their slots do not keep an optimizer from calling it; what it leaves waiting does."""
    model: Any = StreamShard(Stack(), precision=FP32, grad_slots="all")
    plain = Stack()
    plain.load_state_dict(model.full_state_dict(rank0_only=False))
    losses = []
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01, eps=1e-3)
        with each.no_sync() if each is model else contextlib.nullcontext():
            stack_step(each, Call(0, 0, 1, 1.0))
        losses.append(optimizer.step(functools.partial(_step_again, each, optimizer)))
    assert losses[0] == pytest.approx(losses[1])
    assert_same(full_weights(model), dict(plain.state_dict()), "weights")

    def leaves_them() -> float:
        with model.no_sync():
            return float(stack_step(model, Call(1, 0, 1, 1.0)))

    with pytest.raises(ShardingError, match=r"accumulated inside no_sync\(\)"):
        torch.optim.AdamW(model.parameters()).step(leaves_them)


def _step_again(model: nn.Module, optimizer: Any) -> float:
    optimizer.zero_grad()
    return float(stack_step(model, Call(1, 0, 1, 1.0)))


# -- what sharding forbids --------------------------------------------------------------------------------------------


def _fully_shard(model: nn.Module) -> object:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model)


def _fully_shard_a_layer(model: nn.Module) -> object:
    return _fully_shard(model.get_submodule("layers.1"))


def _fsdp(model: nn.Module) -> object:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def _replica(model: Any) -> object:
    return model._replicate_for_data_parallel()  # what DataParallel calls where there are two GPUs


WRAPPERS: dict[str, Callable[[nn.Module], object]] = {
    "fully_shard of Stack": _fully_shard,
    "fully_shard of Layer": _fully_shard_a_layer,
    "FullyShardedDataParallel": _fsdp,
    "DataParallel": _replica,
}


@on_ranks(2)
@pytest.mark.parametrize("name", list(WRAPPERS))
def test_other_wrappers_raise_at_once_and_change_nothing(context: RankContext, name: str) -> None:
    """Each would take pieces for whole parameters."""
    model, plain = _pair()
    with pytest.raises(ShardingError, match=f"{name}.*sharded by StreamShard already"):
        WRAPPERS[name](model)
    model.zero_grad()
    plain.zero_grad()
    for each in (model, plain):
        stack_step(each, Call(1, 0, 1, 1.0))
    assert_same(full_grads(model), full_grads(plain), "gradients")


@on_ranks(2)
def test_zero_redundancy_optimizer_of_pieces_raises(context: RankContext) -> None:
    """Before it sends anything."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, _ = _pair()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    with pytest.raises(ShardingError, match="ZeroRedundancyOptimizer shares out whole parameters"):
        optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_optimizer_that_waits_for_autograd_raises(context: RankContext, when: str) -> None:
    """`_apply_optimizer_in_backward` would never step."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    model: Any = Stack()
    if when == "after":
        model = StreamShard(model, precision=FP32)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(ShardingError, match="would never step.*register_post_accumulate_grad_hook"):
        stack_step(StreamShard(model, precision=FP32) if when == "before" else model, Call(0, 0, 1, 1.0))


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_inside_opacus_raises(context: RankContext, when: str) -> None:
    """`GradSampleModule(model)` gives each parameter a `grad_sample`, which ranks would not average."""
    model: Any = Stack()
    if when == "after":
        model = StreamShard(model, precision=FP32)
    for param in model.parameters():
        param.grad_sample = None
    with pytest.raises(ShardingError, match=r"GradSampleModule .*parameter '.*weight'.*Train without opacus"):
        stack_step(StreamShard(model, precision=FP32) if when == "before" else model, Call(0, 0, 1, 1.0))


@on_ranks(2)
def test_gradients_from_before_sharding_raise(context: RankContext) -> None:
    """They are of one rank's loss, never averaged."""
    model = Stack()
    stack_step(model, Call(0, context.rank, 1, 1.0))
    with pytest.raises(ShardingError, match=r"'layers\.0\.linear\.weight' has a gradient from before"):
        StreamShard(model, precision=FP32)
    model.zero_grad()
    stack_step(StreamShard(model, precision=FP32), Call(0, 0, 1, 1.0))

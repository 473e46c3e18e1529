"""Gradients of a sharded model are pieces: what is computed from them is of all ranks, or raises."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from streamshard import StreamShard
from streamshard.errors import ShardingError
from streamshard.guards.sharded_tensor import ShardedTensor
from tests.compare import assert_same, full_grads
from tests.counts import counted_collectives
from tests.faults import case
from tests.models import Stack, vector_batch
from tests.ranks import Call, RankContext, on_ranks
from tests.reference import FP32, built, sharded_model, stack_step


def _pair() -> tuple[Any, nn.Module]:
    """The same model sharded and plain, with the same gradients."""
    model, plain = sharded_model(), built()
    for each in (plain, model):
        stack_step(each, Call(0, 0, 1, 1.0))
    return model, plain


def _grads(model: nn.Module) -> list[Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


# Of one gradient or parameter: a number.
NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda g: g.norm(),
    "norm of order 1": lambda g: g.norm(1),
    "largest norm": lambda g: torch.linalg.vector_norm(g, math.inf),
    "norm of a sum": lambda g: torch.add(input=g, other=g.data).norm(),
    "norm, by keyword": lambda g: torch.norm(input=g, p=2),
    "norm in another dtype": lambda g: g.double().norm().float(),
    "norm of a clamped copy": lambda g: g.clone().clamp_(-0.01, 0.01).norm(),
    "norms of foreach": lambda g: torch._foreach_norm(list(torch._foreach_add([g, g], [g, g])))[1],
    "norm of noise and it": lambda g: (g + torch.zeros_like(g)).norm(),
    "norm where": lambda g: torch.where(g > 0, g, -g).norm(),
    "sum": lambda g: g.sum(),
    "sum of squares": lambda g: g.pow(2).sum(),
    "mean": lambda g: g.abs().mean(),
    "mean in fp16": lambda g: (g.half() * 0 + 1000).mean(),  # the sum would overflow
    "max": lambda g: g.max(),
    "largest": lambda g: g.abs().amax(),
    "min": lambda g: torch.min(g),
    "any nan": lambda g: float(g.isnan().any()),
    "all finite": lambda g: float(torch.isfinite(g).all()),
    "equal": lambda g: float(torch.equal(g, 2 * g)),
    "size": lambda g: sum(g.shape) + g.numel() + len(g) + g.size(0) + g.dim() + g.nbytes,
    "close": lambda g: float(torch.allclose(g, g + 1e-12)),
    "norm in a wider dtype": lambda g: torch.linalg.vector_norm(3e4 * g.half().sign(), 2, dtype=torch.float32),
    "norms of foreach in a wider dtype": lambda g: torch._foreach_norm([g.half()], 2, dtype=torch.float64)[0].double(),
    "norm of 16 bits": lambda g: (30000.0 * (g.sign() + 2)).half().norm().isinf().float(),
}


@on_ranks(2)
def test_numbers_of_parameters_and_gradients_are_of_all_ranks(context: RankContext) -> None:
    """As of the whole one, on every rank, although ranks hold different and some no elements."""
    model, plain = _pair()
    found, wanted = ([*_grads(each), *(param.detach() for param in each.parameters())] for each in (model, plain))
    for name, number in NUMBERS.items():
        for ours, theirs in zip(found, wanted, strict=True):
            assert float(number(ours)) == pytest.approx(float(number(theirs)), rel=1e-5, abs=1e-7), name


# Of gradients and their norms: gradients.
NORMALISED: dict[str, Callable[[Tensor], Tensor]] = {
    "divided": lambda g: g / g.norm(),
    "multiplied": lambda g: torch.mul(g, g.norm(1)),
    "by a number": lambda g: (0.5 * g) / (g.norm() + 1e-6),
    "in place": lambda g: g.clone().div_(g.norm(math.inf)),
    "in place, in a list": lambda g: _in_place(g, lambda copied: torch._foreach_mul_([copied], g.norm())),
    "in a list": lambda g: torch._foreach_div([g], torch._foreach_norm([g])[0])[0],
    "added": lambda g: torch.addcdiv(g, g, torch.linalg.vector_norm(g)),
    "bounded": lambda g: torch.minimum(g, g.norm() / 100),
    "filled": lambda g: g.clone().fill_(g.norm()),
    "powers": lambda g: g.abs().pow(g.norm().detach()),
    "of what was changed": lambda g: g / _in_place(g.norm(), lambda norm: norm.mul_(2.0).add_(1e-6)),
    "of what was looked at": lambda g: g / _in_place(g.norm(), lambda norm: f"{norm.item()} {norm}"),
}


def _in_place(tensor: Tensor, change: Callable[[Tensor], object]) -> Tensor:
    change(tensor)
    return tensor


@on_ranks(2)
def test_gradients_are_put_together_with_their_global_norms(context: RankContext) -> None:
    """Normalised gradients, adversarial perturbations."""
    model, plain = _pair()
    for name, of in NORMALISED.items():
        for ours, theirs in zip(_grads(model), _grads(plain), strict=True):
            found, wanted = of(ours), of(theirs)
            assert type(found) is ShardedTensor
            assert float(found.norm()) == pytest.approx(float(wanted.norm()), rel=1e-5), name
            assert float(found.sum()) == pytest.approx(float(wanted.sum()), rel=1e-4, abs=1e-5), name


# Of a list of gradients: a number, and how many collectives take part.
TOTALS: dict[str, tuple[Callable[[list[Tensor]], Tensor], int]] = {
    "total norm": (lambda grads: nn.utils.get_total_norm(grads), 1),
    "total norm, one by one": (lambda grads: nn.utils.get_total_norm(grads, norm_type=math.inf, foreach=False), 1),
    "as SAM takes it": (
        lambda grads: torch.norm(torch.stack([(1.0 * g).norm(p=2).to(g.device) for g in grads]), p=2),
        1,
    ),
    "by keyword": (lambda grads: torch.norm(torch.stack([g.norm() for g in grads]), dtype=torch.float64), 1),
    "stacked by keyword": (lambda grads: torch.stack(tensors=[g.norm() for g in grads]).norm(), 10),
    "by hand": (lambda grads: sum((g.norm() ** 2 for g in grads), torch.zeros(())).sqrt(), 10),
}


@on_ranks(2)
def test_a_norm_of_norms_of_all_gradients_takes_one_collective(context: RankContext) -> None:
    """Each gradient's norm by itself takes one."""
    model, plain = _pair()
    for name, (total, count) in TOTALS.items():
        with counted_collectives(model) as counts:
            found = float(total(_grads(model)))
        assert found == pytest.approx(float(total(_grads(plain))), rel=1e-5), name
        assert counts.get("allreduce_", 0) == count == sum(counts.values()), (name, counts)


@on_ranks(2)
def test_assigning_a_gradient_that_is_not_a_piece_raises(context: RankContext) -> None:
    """A full tensor, a tensor of another shape, and another parameter's gradient raise."""
    model, _ = _pair()
    weight, bias = model.layers[1].linear.weight, model.layers[1].linear.bias
    kept = weight.grad
    for grad in (torch.zeros(16, 16), torch.zeros(16), bias.grad):
        with pytest.raises(ShardingError, match=r"\.grad of parameter 'layers\.1.*torch\.zeros_like\("):
            weight.grad = grad
    assert weight.grad is kept
    weight.grad = kept.as_subclass(Tensor).clone()  # of the shape of the piece
    assert type(weight.grad) is ShardedTensor and torch.equal(weight.grad, kept)


@on_ranks(1, 2)
def test_a_gradient_kept_over_zero_grad_raises_after_the_next_backward(context: RankContext) -> None:
    """Its memory holds another gradient then. A clone is the user's own."""
    model, _ = _pair()
    weight = model.layers[1].linear.weight
    kept, copied, views = weight.grad, weight.grad.clone(), [weight.grad.detach(), weight.grad.data]
    assert weight.grad.detach_() is weight.grad  # as zero_grad of older code does
    model.zero_grad()
    assert torch.equal(kept, copied)
    stack_step(model, Call(0, 0, 1, 2.0))
    assert torch.equal(weight.grad, 2.0 * copied)
    uses: list[Callable[[], object]] = [lambda view=view: view.add_(1.0) for view in views]  # type: ignore[misc]
    uses += [lambda: kept + 1.0, lambda: weight.grad - kept, lambda: weight.grad.copy_(kept), kept.norm]
    uses += [lambda: copy.deepcopy(kept), lambda: torch.save(kept, io.BytesIO())]
    for use in uses:
        with pytest.raises(ShardingError, match=r"'layers\.1\.linear\.weight' was kept from an earlier backw.*clone"):
            use()
    if context.world_size > 1:
        with pytest.raises(ShardingError, match=r"\.grad of .*weight': the gradient .* was kept"):
            weight.grad = kept
    stack_step(model, Call(0, 0, 1, 2.0))  # adds to the same gradient
    assert torch.equal(weight.grad, 4.0 * copied)


@on_ranks(2)
def test_gradients_that_nobody_keeps_serve_again(context: RankContext) -> None:
    """The same tensors in new memory. A plain tensor in the old memory keeps its values, and marks end."""
    model, _ = _pair()
    weight = model.layers[1].linear.weight
    wanted, number = weight.grad.clone(), id(weight.grad)

    def step_again() -> None:
        model.zero_grad()
        stack_step(model, Call(0, 0, 1, 1.0))
        assert torch.equal(weight.grad, wanted)

    step_again()
    assert id(weight.grad) == number
    plain = weight.grad.as_subclass(torch.Tensor)
    values = plain.clone()
    step_again()
    weight.grad.zero_()
    assert torch.equal(plain, values)
    step_again()
    factor = torch.ones_like(plain, requires_grad=True)
    with torch._C.DisableTorchFunctionSubclass():
        penalty = (factor * weight.grad).sum()
    model.zero_grad()
    with torch.no_grad():
        model(vector_batch(0, 0))
    penalty.backward()  # its graph has the earlier gradient
    assert factor.grad is not None and torch.equal(factor.grad, values)
    step_again()
    weight.grad.mark = True
    step_again()
    assert not hasattr(weight.grad, "mark")


@on_ranks(2)
def test_a_backward_adds_to_a_gradient_that_was_given_other_memory(context: RankContext) -> None:
    """``p.grad.data = x``, as GrokFast and some ways of clipping write it, without clearing it by None."""
    changes: tuple[Callable[[Any], object], ...] = (
        lambda grad: setattr(grad, "data", grad * 0.5),
        lambda grad: grad.set_(grad * 0.5),
    )
    for change in changes:
        model, plain = _pair()
        for each in (model, plain):
            for number in range(3):
                change(each.layers[1].linear.weight.grad)
                if number == 1:
                    each.zero_grad(set_to_none=False)
                stack_step(each, Call(number, 0, 1, 1.0))
        assert_same(full_grads(model), full_grads(plain), "gradients")


# -- what sharding forbids --------------------------------------------------------------------------------------------


def _zero_redundancy(model: nn.Module) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns: allowed on ranks only

    ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1).step()


_fsdp = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
WRAPPERS: dict[str, Callable[[Any], object]] = {
    r"chunk\(\) of parameter 'layers.*Leave fully_shard out": fully_shard,
    r"chunk\(\) of parameter 'layers\.1": lambda model: fully_shard(model.layers[1]),
    "FSDP around Stack, which StreamShard has sharded": _fsdp,
    # What DataParallel calls where there are two GPUs.
    "DataParallel around Stack, which StreamShard has sharded": lambda model: model._replicate_for_data_parallel(),
    "ZeroRedundancyOptimizer is not known to work .*its inner class": _zero_redundancy,
}


@on_ranks(2)
def test_other_wrappers_raise_at_once_and_change_nothing(context: RankContext) -> None:
    """Each would take pieces for whole parameters."""
    for error, wrap in WRAPPERS.items():
        with case(error):
            model, plain = _pair()
            with pytest.raises(ShardingError, match=error):
                wrap(model)
            model.zero_grad()
            plain.zero_grad()
            for each in (model, plain):
                stack_step(each, Call(1, 0, 1, 1.0))
            assert_same(full_grads(model), full_grads(plain), "gradients")


def _step_in_backward(model: nn.Module) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward  # its import warns: allowed on ranks only

    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})


def _sample_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad_sample = None  # type: ignore[attr-defined]  # as opacus' `GradSampleModule(model)`


@on_ranks(2)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_what_marks_parameters_for_its_own_gradients_raises(context: RankContext, is_sharded: bool) -> None:
    """It would never step, or ranks would not average what it computes."""
    for mark, words in (
        (_step_in_backward, "_in_backward_optimizers.*register_post_accumulate_grad_hook"),
        (_sample_gradients, r"parameter '.*weight' has grad_sample: .*opacus"),
    ):
        model = sharded_model() if is_sharded else Stack()
        mark(model)
        with case(words), pytest.raises(ShardingError, match=words):
            stack_step(model if is_sharded else StreamShard(model, precision=FP32), Call(0, 0, 1, 1.0))


@on_ranks(2)
def test_gradients_from_before_sharding_raise(context: RankContext) -> None:
    """They are of one rank's loss, never averaged."""
    model = Stack()
    stack_step(model, Call(0, context.rank, 1, 1.0))
    with pytest.raises(ShardingError, match=r"'layers\.0\.linear\.weight' has a gradient from before"):
        StreamShard(model, precision=FP32)

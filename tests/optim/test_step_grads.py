"""What optimizers see while they step: gradients with elements, plain ones where kernels want them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from streamshard import full_optimizer_state_dict
from streamshard.errors import ShardingError
from streamshard.optim import elementwise
from tests.models import Stack
from tests.ranks import RankContext, everywhere, on_ranks
from tests.reference import Call, assert_same, case, full_weights, piece_of, sharded_model, stack_step


@elementwise
class _Foreign(Optimizer):
    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.seen: list[Tensor | None] = []  # gradients, of the last step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [param for group in self.param_groups for param in group["params"]]
        self.seen = [param.grad for param in params]
        self.kinds = {type(param.grad) for param in params if param.grad is not None}
        self.update([param for param in params if param.grad is not None])
        return loss

    def update(self, params: list[Tensor]) -> None:
        for param in params:
            param.sub_(param.grad, alpha=self.defaults["lr"])


def _backward(model: nn.Module, number: int = 0) -> float:
    return float(stack_step(model, Call(number, 0, 1, 1.0)))


@on_ranks(2)
def test_empty_pieces_have_gradients_outside_of_steps(context: RankContext) -> None:
    """The same norms on every rank, before a step and after it; nothing is kept for them."""
    model = sharded_model()
    optimizer = _Foreign(model.parameters())
    for number in range(2):
        _backward(model, number)
        grads = [param.grad for param in model.parameters()]
        norms = [float(grad.norm()) for grad in grads]  # each is a collective
        assert everywhere(norms) == [norms] * 2
        optimizer.step()
        assert [grad is None for grad in optimizer.seen] == [not piece_of(param).numel() for param in grads]
        assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))
        assert [float(param.grad.norm()) for param in model.parameters()] == norms
        if number:
            adamw = torch.optim.AdamW(model.parameters())
            adamw.step()
            assert set(adamw.state) == {param for param in model.parameters() if piece_of(param).numel()}
        optimizer.zero_grad()
        assert all(param.grad is None for param in model.parameters())


@on_ranks(2)
def test_a_closure_sees_and_makes_all_gradients(context: RankContext) -> None:
    """It clips them; the step that called it sees those with elements."""
    model, plain = sharded_model(), Stack()
    plain.load_state_dict(full_weights(model))
    ours, theirs = (_Foreign(each.parameters()) for each in (model, plain))
    params, norms = list(model.parameters()), []

    def closure() -> float:
        ours.zero_grad()
        loss = _backward(model, number)
        assert not any(param.grad is None for param in params)
        norms.append(float(nn.utils.clip_grad_norm_(params, 0.1)))
        return loss

    for number in range(3):
        loss = ours.step(closure=closure) if number else ours.step(closure)
        assert [grad is None for grad in ours.seen] == [not piece_of(param).numel() for param in params]
        assert not any(param.grad is None for param in params)
        theirs.zero_grad()
        assert _backward(plain, number) == pytest.approx(loss)
        assert float(nn.utils.clip_grad_norm_(plain.parameters(), 0.1)) == pytest.approx(norms[-1])
        theirs.step()
    assert_same(full_weights(model), dict(plain.state_dict()), "weights")


# -- what is known ----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_norms_that_bitsandbytes_is_asked_for_are_refused(context: RankContext) -> None:
    """Of an optimizer that else works element by element."""
    for asked in [{"max_unorm": 0.5}, {"percentile_clipping": 5}, {"block_wise": False}, {}]:
        with case(asked):
            model = sharded_model()
            optimizer = type("Adam", (_Foreign,), {"__module__": "bitsandbytes.optim.adam"})(model.parameters())
            defaults = {"max_unorm": 0.0, "percentile_clipping": 100, "block_wise": True}
            optimizer.args = SimpleNamespace(**defaults | asked)
            _backward(model)
            refused = pytest.raises(ShardingError, match="Adam with max_unorm, .* takes norms")
            with refused if asked else contextlib.nullcontext():
                optimizer.step()


@elementwise
class _KeepsGrads(_Foreign):
    """Uses the gradients of the last step. Its second group keeps copies."""

    def update(self, params: list[Tensor]) -> None:
        for param in params:
            assert param.grad is not None
            is_copy = any(param is each for each in self.param_groups[1]["params"])
            self.state[param]["previous"] = param.grad.clone() if is_copy else param.grad.view(-1)


@on_ranks(2)
def test_an_optimizer_that_keeps_gradients_in_its_state_is_refused(context: RankContext) -> None:
    """The next backward writes to their memory. A clone is the optimizer's own."""
    model = sharded_model()
    params = [*model.parameters()]
    _backward(model)
    _KeepsGrads([{"params": []}, {"params": params}]).step()
    with pytest.raises(ShardingError, match=r"keeps the gradient of '.*' in its state, as 'previous', .*clone\(\)"):
        _KeepsGrads([{"params": params[:1]}, {"params": params[1:]}]).step()


# -- state that is not one number for each element --------------------------------------------------------------------


@elementwise
class _Blocks(_Foreign):
    def update(self, params: list[Tensor]) -> None:
        for param in params:
            state = self.state[param]
            state["codes"] = torch.zeros_like(param, dtype=torch.uint8)
            state["scales"] = torch.ones(param.numel() // 4 + 2)


@on_ranks(2)
def test_quantized_state_is_not_put_together(context: RankContext) -> None:
    model = sharded_model()
    optimizer = _Blocks(model.parameters())
    _backward(model)
    optimizer.step()
    with pytest.raises(ShardingError, match="one number for each element.*which ranks cannot put together"):
        full_optimizer_state_dict(model, optimizer)

"""`check_grads` names bad gradients on all ranks, and all ranks skip the same steps by the gradient norm."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from streamshard import GradientError, Precision, StreamShard
from tests.models import DIM, Layer, Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    EXACT,
    FP32,
    SETTINGS,
    Call,
    Tolerance,
    adamw,
    assert_same,
    assert_trains_like_plain,
    counted_collectives,
    each_setting,
    full_grads,
    full_weights,
    stack_step,
)

NAN, INF = math.nan, math.inf


class SpoiltLayer(Layer):
    """A layer of whose bias one gradient element is spoilt on request."""

    spoilt: tuple[int, float] | None = None  # element, value

    def forward(self, x: Tensor) -> Tensor:
        """tanh(W x + b), added to x where shapes allow."""
        bias = self.linear.bias.clone()
        if bias.requires_grad:
            bias.register_hook(self._spoil)
        y = torch.tanh(F.linear(x, self.linear.weight, bias))
        return x + y if x.shape == y.shape else y

    def _spoil(self, grad: Tensor) -> Tensor:
        grad = grad.clone()
        if self.spoilt is not None:
            element, value = self.spoilt
            grad[element] = value
        return grad


class SpoiltStack(Stack):
    """Layers and head can be spoilt; layer "head" is in the root unit, which the engine reduces last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SpoiltLayer() for _ in range(4))
        self.head = SpoiltLayer(DIM, 1)  # type: ignore[assignment]

    def spoil(self, name: str, element: int, value: float) -> None:
        """Spoil one element of the gradient of the bias of layer `name` in each backward until `heal`."""
        self.get_submodule(name).spoilt = (element, value)  # type: ignore[assignment]

    def heal(self) -> None:
        """Nothing is spoilt any more."""
        for module in self.modules():
            if isinstance(module, SpoiltLayer):
                module.spoilt = None


def _model(**settings: Any) -> Any:
    torch.manual_seed(7)
    return StreamShard(SpoiltStack(), **{"precision": FP32, "check_grads": True, **settings})


def _step(model: nn.Module, context: RankContext, number: int = 0) -> Tensor:
    return stack_step(model, Call(number, context.rank, context.world_size, 1.0))


def _error(model: nn.Module, context: RankContext, number: int = 0) -> str:
    """What the backward of one step raises; the same on all ranks."""
    with pytest.raises(GradientError) as caught:
        _step(model, context, number)
    everywhere: list[str] = [""] * context.world_size
    dist.all_gather_object(everywhere, str(caught.value))
    assert len(set(everywhere)) == 1
    return everywhere[0]


@on_ranks()
@each_setting
def test_one_bad_element_on_one_rank_raises_on_all(context: RankContext, settings: str) -> None:
    """At any place. The message names the parameter and says what its gradient holds. The check is one collective."""
    model = _model(**SETTINGS[settings])
    for element, value, word in ((0, NAN, "nan"), (-1, INF, "inf"), (0, -INF, "inf")):
        if context.rank == context.world_size - 1:
            model.spoil("layers.2", element, value)
        message = _error(model, context)
        assert message.startswith(f"the gradient of 'layers.2.linear.bias' holds {word} ")
        assert "first of 1 such gradients, of 10 in all" in message
        model.heal()
        model.zero_grad()
    with counted_collectives(model) as counts:
        _step(model, context)
    assert counts.get("allreduce_", 0) == (context.world_size > 1)


@on_ranks()
@each_setting
def test_training_goes_on_after_an_error(context: RankContext, settings: str) -> None:
    """The gradients are there, as without the check; after `zero_grad` steps are those that plain PyTorch makes."""
    model, unchecked = _model(**SETTINGS[settings]), _model(**SETTINGS[settings], check_grads=False)
    for its in (model, unchecked):
        its.spoil("layers.2", 0, INF)
    _error(model, context)
    _step(unchecked, context)
    found, wanted = full_grads(model), full_grads(unchecked)
    assert not found["layers.2.linear.bias"].isfinite().all()  # type: ignore[union-attr]
    for grads in (found, wanted):
        grads["layers.2.linear.bias"][0] = 0.0  # type: ignore[index]
    assert_same(found, wanted, "gradients after the error", EXACT)

    def heal_and_spoil(its: nn.Module, number: int) -> None:
        assert isinstance(its, SpoiltStack)
        its.heal()
        if number == 2 and isinstance(its, StreamShard):
            its.spoil("layers.1", 0, NAN)
            _error(its, context)
            its.heal()
            its.zero_grad()

    options: Any = {"optimizer": adamw, "prepare": heal_and_spoil, "check_grads": True, **SETTINGS[settings]}
    assert_trains_like_plain(context, SpoiltStack, stack_step, **options)


@on_ranks(2)
@pytest.mark.parametrize("settings", SETTINGS)
def test_accumulated_gradients_are_checked_when_they_are_reduced(context: RankContext, settings: str) -> None:
    """Inside `no_sync` at once, or, where they wait in slots, by the backward that reduces them."""
    model = _model(**SETTINGS[settings])
    with model.no_sync():
        _step(model, context)
        model.spoil("layers.3", 1, NAN)
        if settings == "a slot each":
            _step(model, context, 1)
        else:
            assert "layers.3" in _error(model, context, 1)
    model.heal()
    assert "layers.3" in _error(model, context, 2), "what was accumulated is still there"
    model.zero_grad()
    _step(model, context, 3)


@on_ranks(2)
def test_no_hook_sees_gradients_that_are_refused(context: RankContext) -> None:
    """An optimizer that steps inside backward must not step, here with gradients that were found to be bad."""
    model = _model()
    called = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: called.append(name))
    _step(model, context)
    assert sorted(called) == sorted(name for name, _ in model.named_parameters())
    called.clear()
    model.spoil("layers.2", 0, NAN)
    _error(model, context)
    assert called == []


@on_ranks()
@each_setting
def test_steps_above_the_threshold_are_skipped_as_plain_pytorch_would(context: RankContext, settings: str) -> None:
    """Twelve steps, some with gradients that are too large, inf or nan on one rank."""
    skip_above, max_norm, norm_type = 50.0, 0.5, 2.0
    torch.manual_seed(7)
    plain = Stack()
    torch.manual_seed(7)
    model: Any = StreamShard(Stack(), precision=FP32, **SETTINGS[settings])
    optimizer, plain_optimizer = adamw(model), adamw(plain)
    size, skipped = context.world_size, []
    for number, factor in enumerate([1.0, 1.0, 1e4, 1.0, INF, NAN, 1.0, -INF, 1e6, 1.0, 1.0, NAN]):
        factors = [factor if rank == number % size else 1.0 for rank in range(size)]
        for rank in range(size):
            stack_step(plain, Call(number, rank, size, factors[rank] / size))
        stack_step(model, Call(number, context.rank, size, factors[context.rank]))
        wanted = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None], norm_type)
        found = model.clip_grad_norm_(max_norm, norm_type)
        if not found <= skip_above:
            optimizer.zero_grad()
        assert math.isfinite(wanted) == math.isfinite(found)
        if math.isfinite(wanted):
            assert_same({"norm": found}, {"norm": wanted}, f"norm of step {number}")
        if math.isfinite(wanted) and wanted <= skip_above:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
        else:
            skipped.append(number)
            plain_optimizer.zero_grad()
        plain_optimizer.step()
        optimizer.step()
        if number not in skipped:
            plain_optimizer.zero_grad()
            optimizer.zero_grad()
    assert skipped == [2, 4, 5, 7, 8, 11]
    assert_same(full_weights(model), full_weights(plain), "weights", Tolerance(1e-4, 1e-6))


@on_ranks(2)
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_skipped_for_a_large_norm_leaves_the_loss_scale_alone(context: RankContext, fused: bool) -> None:
    """Too large but finite: the scale goes on as after any step. Not finite: it backs off."""
    model = _model(precision=Precision(param_dtype=torch.float16), check_grads=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    for weight, scale in ((1e3, 16.0), (INF, 8.0)):
        before = full_weights(model)
        loss = model(vector_batch(0, context.rank)).float().square().mean() * weight
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        if not model.clip_grad_norm_(1.0) <= 10.0:
            optimizer.zero_grad()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
        assert_same(full_weights(model), before, "weights after a skipped step", EXACT)
        assert not optimizer.state

"""Weights that the user changes between steps, by whatever means, are the weights that the next forward uses."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamshard import Precision, StreamShard
from tests.models import Stack, TinyConfig, TinyLM, token_batch, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    FP32,
    Call,
    Tolerance,
    adamw,
    assert_same,
    assert_trains_like_plain,
    full_weights,
    lm_step,
    sgd,
    stack_step,
)

BF16 = Precision(param_dtype=torch.bfloat16)
PRECISIONS = {"fp32": FP32, "bf16": BF16}
NEAR = {"fp32": Tolerance(), "bf16": Tolerance(relative=3e-2, absolute=1e-3)}


def _in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)


def _through_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(0.5)


def _through_detach(model: nn.Module) -> None:
    for p in model.parameters():
        p.detach().mul_(0.5)


def _data_copied(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.copy_(p.data.clone() * 0.5)


def _data_replaced(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data.clone() * 0.5


def _through_numpy(model: nn.Module) -> None:
    for p in model.parameters():
        array = p.detach().as_subclass(Tensor).numpy()  # this rank's, who asks for that
        array *= 0.5


def _foreach(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)


def _set(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.set_(p.detach().clone() * 0.5)  # type: ignore[call-overload]


def _one_layer(model: Any) -> None:
    with torch.no_grad():
        model.layers[1].linear.weight.mul_(0.5)
        model.head.bias.add_(0.25)


def _state_dict_values(model: nn.Module) -> None:
    for value in model.state_dict().values():
        value.mul_(0.5)


def _own_state_dict(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() * 0.5 for name, value in model.state_dict().items()})


def _full_state_dict(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in full_weights(model).items()})


def _part_of_a_full_state_dict(model: nn.Module) -> None:
    full = full_weights(model)
    keys = model.load_state_dict({"layers.2.linear.weight": full["layers.2.linear.weight"] * 0.5}, strict=False)
    assert not keys.unexpected_keys


def _submodules_state_dict(model: Any) -> None:
    full = full_weights(model)
    model.layers[1].load_state_dict(
        {name.removeprefix("layers.1."): value * 0.5 for name, value in full.items() if name.startswith("layers.1.")}
    )


def _summoned(model: nn.Module) -> None:
    if isinstance(model, StreamShard):
        with model.summon_full_params(writeback=True):
            _in_place(model)
    else:
        _in_place(model)


def _fused_step(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = p.detach().sign().contiguous()
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()
    model.zero_grad()


EDITS: dict[str, Callable[[Any], None]] = {
    "in place": _in_place,
    "through .data": _through_data,
    "through detach()": _through_detach,
    ".data copied into": _data_copied,
    ".data replaced": _data_replaced,
    "through numpy": _through_numpy,
    "foreach": _foreach,
    "set_": _set,
    "one layer only": _one_layer,
    "values of the state dict": _state_dict_values,
    "load_state_dict of its own": _own_state_dict,
    "load_state_dict of the whole": _full_state_dict,
    "load_state_dict of a part": _part_of_a_full_state_dict,
    "load_state_dict of a submodule": _submodules_state_dict,
    "summoned and written back": _summoned,
    "a fused optimizer": _fused_step,
}


@on_ranks(1, 2)
@pytest.mark.parametrize("how", EDITS)
def test_edited_weights_are_the_ones_trained_next(context: RankContext, how: str) -> None:
    """Loss and gradients of the step right after the edit, and training from there."""

    def prepare(model: nn.Module, number: int) -> None:
        if number in (1, 2):
            EDITS[how](model)

    assert_trains_like_plain(context, Stack, stack_step, prepare=prepare)


@on_ranks(1, 2)
# Loading a part moves the output less than bf16 rounds: the fp32 test above is the one that can tell.
@pytest.mark.parametrize("how", [how for how in EDITS if " of a " not in how])
def test_edited_weights_are_the_ones_used_next_in_bf16(context: RankContext, how: str) -> None:
    """Compute shards are cast anew: a forward right after the edit, with and without gradients, between steps."""
    torch.manual_seed(7)
    plain = Stack()
    torch.manual_seed(7)
    model = StreamShard(Stack(), precision=BF16)
    optimizer = sgd(model)
    x = vector_batch(0, context.rank)
    for number in range(3):
        rounded = copy.deepcopy(plain).bfloat16()
        for grad_mode in (torch.no_grad, torch.enable_grad):
            with grad_mode():
                found, wanted = model(x), rounded(x.bfloat16())
            assert_same({"out": found}, {"out": wanted}, f"forward {number}", Tolerance(relative=1e-2))
        found.float().square().mean().backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
            group["weight_decay"] = 0.0
        optimizer.step()
        optimizer.zero_grad()
        before = wanted.detach().clone()
        EDITS[how](model)
        EDITS[how](plain)
        moved = (copy.deepcopy(plain).bfloat16()(x.bfloat16()).detach() - before).abs().max()
        assert float(moved) > 0.02 * float(before.abs().max())  # else this would pass with stale weights


@on_ranks(1, 2)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_edits_between_evaluations_are_seen(context: RankContext, precision: str, mode: Any) -> None:
    """Two evaluations in a row with an edit between, no training at all."""
    torch.manual_seed(7)
    plain: Any = Stack()
    torch.manual_seed(7)
    model: Any = StreamShard(Stack(), precision=PRECISIONS[precision])
    x = vector_batch(0, context.rank)
    for number in range(3):
        with mode():
            found, wanted = model(x), plain(x)
        assert_same({"out": found}, {"out": wanted}, f"evaluation {number}", NEAR[precision])
        _through_data(model)
        _through_data(plain)


@on_ranks(2)
def test_edits_after_an_evaluation_are_not_seen_by_ranks_that_are_still_at_it(context: RankContext) -> None:
    """In fp32 they read the weights themselves, of which this rank is done with."""
    model: Any = StreamShard(Stack(), precision=FP32)
    batch = vector_batch(0, context.rank)
    with torch.no_grad():
        wanted = model(batch)
        if context.rank == 1:
            model.layers[1].register_forward_pre_hook(lambda module, args: time.sleep(0.2))
        found = model(batch)
    for param in model.parameters():
        param.data.zero_()
    assert torch.equal(found, wanted)


@on_ranks(2)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_ema_swap_is_seen_and_undone(context: RankContext, precision: str) -> None:
    """An average kept beside the shards, swapped in for evaluation, swapped out again for training."""
    torch.manual_seed(7)
    plain = Stack()
    torch.manual_seed(7)
    model = StreamShard(Stack(), precision=PRECISIONS[precision])
    averages = {id(m): {n: p.detach().clone() for n, p in m.named_parameters()} for m in (plain, model)}
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (plain, model)]
    x = vector_batch(50, context.rank)

    def swap(m: nn.Module) -> None:
        for name, p in m.named_parameters():
            average = averages[id(m)][name]
            held = p.data.clone()
            p.data.copy_(average)
            average.copy_(held)

    for number in range(3):
        for rank in range(2):
            stack_step(plain, Call(number, rank, 2, 0.5))
        model(vector_batch(number, context.rank)).float().square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for m in (plain, model):
            for name, p in m.named_parameters():
                averages[id(m)][name].lerp_(p.detach(), 0.1)
            swap(m)
        with torch.no_grad():
            assert_same({"out": model(x)}, {"out": plain(x)}, f"average after step {number}", NEAR[precision])
        for m in (plain, model):
            swap(m)
        with torch.no_grad():
            assert_same({"out": model(x)}, {"out": plain(x)}, f"weights after step {number}", NEAR[precision])


@on_ranks(2)
def test_pytorchs_own_ema_refuses_or_works(context: RankContext) -> None:
    """`AveragedModel` copies the model, which must not quietly give a broken one."""
    model = StreamShard(Stack(), precision=FP32)
    try:
        averaged = torch.optim.swa_utils.AveragedModel(model)
    except RuntimeError as error:
        assert "full_state_dict" in str(error) or "summon_full_params" in str(error)
    else:
        x = vector_batch(0, context.rank)
        assert_same({"out": averaged(x)}, {"out": model(x)}, "copy")


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("tied", [False, True])
def test_a_full_state_dict_loads_into_a_sharded_model_and_back(context: RankContext, tied: bool) -> None:
    """What `full_state_dict` gives loads into a plain model; what a plain one gives loads into a sharded model."""
    config = TinyConfig(tied=tied)
    torch.manual_seed(1)
    plain = TinyLM(config)
    torch.manual_seed(2)
    model = StreamShard(TinyLM(config), precision=FP32)
    keys = model.load_state_dict(plain.state_dict())
    assert not keys.missing_keys and not keys.unexpected_keys
    assert_same(full_weights(model), plain.state_dict(), "loaded")
    tokens = token_batch(0, context.rank)
    with torch.no_grad():
        assert_same({"logits": model(tokens)}, {"logits": plain(tokens)}, "forward")
    other = TinyLM(config)
    other.load_state_dict(model.full_state_dict(rank0_only=False))
    assert_same(other.state_dict(), plain.state_dict(), "loaded back")


@on_ranks(2)
def test_load_state_dict_takes_half_precision_values(context: RankContext) -> None:
    """A bf16 checkpoint loads into fp32 main weights, as it does into a plain fp32 model."""
    torch.manual_seed(1)
    state = {name: value.bfloat16() for name, value in Stack().state_dict().items()}
    model = StreamShard(Stack(), precision=FP32)
    model.load_state_dict(state)
    assert_same(full_weights(model), {name: value.float() for name, value in state.items()}, "loaded")


@on_ranks(2)
def test_load_state_dict_complains_as_usual(context: RankContext) -> None:
    """Missing, unexpected and misshapen entries are PyTorch's own errors, and nothing is lost by them."""
    model = StreamShard(Stack(), precision=FP32)
    full = full_weights(model)
    with pytest.raises(RuntimeError, match="head.bias"):
        model.load_state_dict({name: value for name, value in full.items() if name != "head.bias"})
    with pytest.raises(RuntimeError, match="foreign"):
        model.load_state_dict({**full, "foreign": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"layers\.0\.linear\.weight"):
        model.load_state_dict({**full, "layers.0.linear.weight": torch.zeros(3, 3)})
    stack_step(model, Call(0, context.rank, 2, 1.0))


@on_ranks(2)
def test_load_state_dict_with_assign_raises_or_works(context: RankContext) -> None:
    """`assign=True` would replace the parameters the engine and the optimizer hold."""
    torch.manual_seed(1)
    plain = Stack()
    model = StreamShard(Stack(), precision=FP32)
    optimizer = sgd(model)
    try:
        model.load_state_dict(plain.state_dict(), assign=True)
    except RuntimeError as error:
        assert "assign" in str(error)
        return
    x = vector_batch(0, context.rank)
    with torch.no_grad():
        assert_same({"out": model(x)}, {"out": plain(x)}, "forward")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert all(id(p) in held for p in model.parameters())


@on_ranks(2)
def test_weights_edited_before_the_first_forward_are_used(context: RankContext) -> None:
    """Between sharding and the first step."""

    def prepare(model: nn.Module, number: int) -> None:
        if number == 0:
            _through_data(model)

    assert_trains_like_plain(context, Stack, stack_step, prepare=prepare, checked=(0, 2))


@on_ranks(2)
def test_gradients_edited_by_the_user_are_what_the_optimizer_sees(context: RankContext) -> None:
    """Scaled in place, replaced, and noise added between backward and step."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw(model)

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            for index, p in enumerate(model.parameters()):
                if p.grad is not None:
                    p.grad.mul_(0.5)
                    if index % 2:
                        p.grad = p.grad * 3.0

        optimizer.register_step_pre_hook(before)
        return optimizer

    assert_trains_like_plain(context, TinyLM, lm_step, optimizer=make)


@on_ranks(2)
def test_a_gradient_replaced_during_accumulation_is_added_to(context: RankContext) -> None:
    """The user's own tensor in `p.grad` is what the next backward adds to."""

    def step(model: nn.Module, call: Call) -> Tensor:
        loss = stack_step(model, call)
        if not isinstance(model, StreamShard) and call.rank + 1 < call.world_size:
            return loss
        for p in model.parameters():
            if p.grad is not None:
                p.grad = p.grad.clone() * 0.5
        return loss

    def twice(model: nn.Module, call: Call) -> Tensor:
        if isinstance(model, StreamShard):
            return step(model, call) + step(model, call._replace(step=call.step + 30))
        if call.rank + 1 < call.world_size:
            return _loss_only(model, call)
        for number in (call.step, call.step + 30):
            for rank in range(call.world_size):
                stack_step(model, call._replace(step=number, rank=rank))
            for p in model.parameters():
                assert p.grad is not None
                p.grad = p.grad.clone() * 0.5
        return torch.zeros(())

    torch.manual_seed(7)
    plain = Stack()
    torch.manual_seed(7)
    model = StreamShard(Stack(), precision=FP32)
    for rank in range(2):
        twice(plain, Call(0, rank, 2, 0.5))
    twice(model, Call(0, context.rank, 2, 1.0))
    wanted = copy.deepcopy(plain)
    sgd(plain).step()
    sgd(model).step()
    assert_same(full_weights(model), plain.state_dict(), "weights")
    assert any(not torch.equal(a, b) for a, b in zip(wanted.parameters(), plain.parameters(), strict=True))


def _loss_only(model: nn.Module, call: Call) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(vector_batch(call.step, call.rank)).square().mean()
    return out


@on_ranks(2)
@pytest.mark.parametrize("where", ["layers.1.linear.weight", "head.bias"])
def test_a_parameter_replaced_by_another_object_is_used_or_an_error(context: RankContext, where: str) -> None:
    """Assigning a new Parameter takes it out of the engine's hands; that must not go unnoticed."""
    torch.manual_seed(7)
    plain = Stack()
    torch.manual_seed(7)
    model = StreamShard(Stack(), precision=FP32)
    path, _, name = where.rpartition(".")
    value = torch.full_like(plain.get_parameter(where), 0.1)
    setattr(plain.get_submodule(path), name, nn.Parameter(value.clone()))
    x = vector_batch(0, context.rank)
    try:
        setattr(model.get_submodule(path), name, nn.Parameter(value.clone()))
        found = model(x)
    except RuntimeError as error:
        assert where in str(error)
    else:
        assert_same({"out": found}, {"out": plain(x)}, "forward")


@on_ranks(2)
def test_a_layer_replaced_after_sharding_is_used_or_an_error(context: RankContext) -> None:
    """`model.head = nn.Linear(...)`: a new module is not sharded, so its gradients would stay local."""
    model: Any = StreamShard(Stack(), precision=FP32)
    try:
        model.head = nn.Linear(16, 1)
        stack_step(model, Call(0, context.rank, 2, 1.0))
    except RuntimeError as error:
        assert "head" in str(error)
        return
    mine = model.head.weight.grad.clone()
    both = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(both, mine)
    assert torch.equal(both[0], both[1]), "gradients of the new layer are this rank's alone"

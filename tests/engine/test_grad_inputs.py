"""``torch.autograd.grad`` and ``backward(inputs=...)`` of sharded parameters: plain PyTorch's numbers, or an error."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamshard import StreamShard
from streamshard.errors import ShardingError
from streamshard.inspect import engine_inside
from tests.models import Layer, Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    FP32,
    SETTINGS,
    Call,
    assert_same,
    assert_trains_like_plain,
    each_setting,
    full_grads,
    full_weights,
    stack_step,
)


def _loss(model: nn.Module, call: Call, part: int = 0) -> Tensor:
    loss: Tensor = model(vector_batch(3 * call.step + part, call.rank)).square().mean()
    return loss * call.weight


def _put(params: Iterable[nn.Parameter], grads: Iterable[Tensor | None], factor: float = 1.0) -> None:
    """Let `grads` count as gradients of `params`, beside what these have."""
    for param, grad in zip(params, grads, strict=True):
        if grad is not None:
            assert grad.shape == param.shape
            param.grad = grad * factor if param.grad is None else param.grad + grad * factor


def _of_all(model: nn.Module, call: Call) -> Tensor:
    loss, params = _loss(model, call), list(model.parameters())
    _put(params, torch.autograd.grad(loss, params))
    return loss.detach() / call.weight


def _of_some(model: Any, call: Call) -> Tensor:
    """A layer inside, and the head; others get nothing."""
    loss, params = _loss(model, call), [*model.layers[1].parameters(), model.head.weight]
    _put(params, torch.autograd.grad([loss], params, retain_graph=False))
    return loss.detach() / call.weight


def _beside_others(model: Any, call: Call) -> Tensor:
    """``.grad`` holds what a backward has left there, before and after."""
    params = list(model.parameters())
    loss = _loss(model, call, 1)
    loss.backward()  # type: ignore[no-untyped-call]
    held = [param.grad for param in params]
    copies = [grad.clone() for grad in held if grad is not None]
    grads = torch.autograd.grad(_loss(model, call), params)
    assert all(param.grad is grad for param, grad in zip(params, held, strict=True))
    assert all(bool((grad == copy).all()) for grad, copy in zip(held, copies, strict=True) if grad is not None)
    _loss(model, call, 2).backward()  # type: ignore[no-untyped-call]
    _put(params, grads, 3.0)
    return loss.detach() / call.weight


def _of_two_losses(model: Any, call: Call) -> Tensor:
    """As weighting of tasks by their gradients does, on one graph."""
    x = model(vector_batch(call.step, call.rank))
    first, second = x.square().mean() * call.weight, x.mean() * call.weight
    params = list(model.parameters())
    _put(params, torch.autograd.grad(first, params, retain_graph=True))
    _put(params, torch.autograd.grad(second, params), -0.5)
    return first.detach() / call.weight


def _with_an_input(model: Any, call: Call) -> Tensor:
    x = vector_batch(call.step, call.rank).requires_grad_()
    loss = model(x).square().mean() * call.weight
    of_weight, of_input, of_bias = torch.autograd.grad(loss, [model.head.weight, x, model.layers[0].linear.bias])
    assert x.grad is None
    assert of_input.shape == x.shape
    _put([model.head.weight, model.layers[0].linear.bias], [of_weight, of_bias])
    return of_input.square().sum().detach() / call.weight**2  # compared as the loss is


def _with_a_penalty(model: Any, call: Call) -> Tensor:
    """Of which a rank's piece has its part by itself."""
    params = list(model.parameters())
    loss = _loss(model, call)
    penalty = 0.1 * call.weight * torch.stack([param.square().sum() for param in params]).sum()
    _put(params, torch.autograd.grad(loss + penalty, params))
    return loss.detach() / call.weight


def _of_a_skipped_layer(model: Any, call: Call) -> Tensor:
    model.skipped = 2
    loss, params = _loss(model, call), list(model.parameters())
    grads = torch.autograd.grad(loss, params, allow_unused=True)
    assert [grad is None for grad in grads] == ["layers.2." in name for name, _ in model.named_parameters()]
    _put(params, grads)
    loss = _loss(model, call)
    filled = torch.autograd.grad(loss, params, materialize_grads=True)
    _put(params, filled)
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(_loss(model, call), params)
    return loss.detach() / call.weight


def _of_a_layer_that_ranks_left_out(model: Any, call: Call) -> Tensor:
    """Each another one: nothing that is asked for has a part in the graph of one of them."""
    model.skipped = 1 + call.rank if call.step else None
    loss = _loss(model, call)
    loss.backward(inputs=list(model.layers[1].parameters()), retain_graph=True)  # type: ignore[no-untyped-call]
    weight = model.layers[2].linear.weight
    grads = torch.autograd.grad(loss, [weight], allow_unused=True)
    if isinstance(model, StreamShard) or grads[0] is not None:  # of all ranks' losses
        _put([weight], grads)
    _loss(model, call, 1).backward()  # type: ignore[no-untyped-call]
    model.skipped = None
    return loss.detach() / call.weight


def _of_a_layer_that_one_rank_left_out(model: Any, call: Call) -> Tensor:
    """The first rank's graph has nothing of what is asked for. Those of all others have."""
    model.skipped = 1 if call.step and not call.rank else None
    loss = _loss(model, call)
    loss.backward(inputs=list(model.layers[1].parameters()))
    model.skipped = None
    return loss.detach() / call.weight


def _by_name(model: nn.Module, call: Call) -> Tensor:
    """torch takes a dictionary too."""
    loss, named = _loss(model, call), dict(model.named_parameters())
    grads = torch.autograd.grad(loss, named)
    assert list(grads) == list(named)
    _put(named.values(), grads.values())
    return loss.detach() / call.weight


def _inputs_of_backward(model: nn.Module, call: Call) -> Tensor:
    loss = _loss(model, call)
    loss.backward(inputs=list(model.parameters()))  # type: ignore[no-untyped-call]
    return loss.detach() / call.weight


def _some_inputs_of_backward(model: Any, call: Call) -> Tensor:
    """One alone, then others beside an activation of the user's, and to what the first holds."""
    x = vector_batch(call.step, call.rank).requires_grad_()
    loss = model(x).square().mean() * call.weight
    loss.backward(inputs=model.layers[3].linear.weight, retain_graph=True)
    assert model.head.bias.grad is None
    torch.autograd.backward(loss, inputs=[model.layers[3].linear.weight, x, model.layers[0].linear.bias])
    assert x.grad is not None
    return loss.detach() / call.weight


def _frozen_meanwhile(model: Any, call: Call) -> Tensor:
    """A forward with the head frozen comes between a graph and its backward."""
    loss = _loss(model, call)
    model.head.requires_grad_(False)
    with torch.no_grad():
        _loss(model, call, 1)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    model.head.requires_grad_(True)
    loss.backward(inputs=list(model.parameters()), retain_graph=True)  # type: ignore[no-untyped-call]
    _put(model.parameters(), torch.autograd.grad(loss, list(model.parameters())))
    return loss.detach() / call.weight


class SkippingStack(Stack):
    """A stack of which a layer can be left out."""

    skipped: int | None = None

    def order(self) -> Iterable[nn.Module]:
        return [layer for number, layer in enumerate(self.layers) if number != self.skipped]


def _torch_takes_names() -> bool:
    x = torch.ones((), requires_grad=True)
    try:
        torch.autograd.grad(x * 2, {"x": x})
    except RuntimeError:
        return False
    return True


STEPS: dict[str, Callable[[Any, Call], Tensor]] = {
    "of all parameters": _of_all,
    "of some": _of_some,
    "beside gradients that are held": _beside_others,
    "of two losses of one graph": _of_two_losses,
    "with an input among them": _with_an_input,
    "of a penalty too": _with_a_penalty,
    "of a layer that was skipped": _of_a_skipped_layer,
    "of a layer that some ranks skipped": _of_a_layer_that_ranks_left_out,
    "of a layer that one rank skipped": _of_a_layer_that_one_rank_left_out,
    **({"by name": _by_name} if _torch_takes_names() else {}),  # torch 2.11 takes none
    "as inputs of a backward": _inputs_of_backward,
    "some, as inputs of a backward": _some_inputs_of_backward,
    "frozen meanwhile": _frozen_meanwhile,
}


@on_ranks()
@each_setting
@pytest.mark.parametrize("what", STEPS)
def test_gradients_that_are_asked_for_are_plain_pytorchs(context: RankContext, what: str, settings: str) -> None:
    """The mean over ranks, in pieces: what a backward leaves in ``.grad``."""
    assert_trains_like_plain(context, SkippingStack, STEPS[what], checked=(0, 1, 3), **SETTINGS[settings])


@on_ranks(2)
def test_what_is_asked_for_is_what_a_backward_leaves(context: RankContext) -> None:
    """bf16, the same bits; hooks of parameters are called by the backward alone."""
    model = StreamShard(Stack())
    call = Call(0, context.rank, context.world_size, 1.0)
    called: list[int] = []
    params = list(model.parameters())
    for number, param in enumerate(params):
        param.register_post_accumulate_grad_hook(lambda _, number=number: called.append(number))
    grads = torch.autograd.grad(_loss(model, call), params)
    assert not called
    assert all(param.grad is None for param in params)
    stack_step(model, call)
    assert sorted(called) == list(range(len(params)))
    for param, grad in zip(params, grads, strict=True):
        assert param.grad is not None
        assert type(grad) is type(param.grad)
        assert bool((grad == param.grad).all())


@on_ranks(1, 2)
def test_what_is_returned_stays_what_it_is(context: RankContext) -> None:
    """The next backward does not write into it, and it counts as a global gradient: its norm is the whole one's."""
    model = StreamShard(Stack(), precision=FP32)
    call = Call(0, context.rank, context.world_size, 1.0)
    params = list(model.parameters())
    first = torch.autograd.grad(_loss(model, call), params)
    norms = [float(grad.norm()) for grad in first]
    second = torch.autograd.grad(_loss(model, call, 1), params)
    stack_step(model, call)
    assert [float(grad.norm()) for grad in first] == norms
    assert norms != [float(grad.norm()) for grad in second]
    wanted = full_grads(model)
    for norm, (name, _) in zip(norms, model.named_parameters(), strict=True):
        grad = wanted[name]
        assert grad is not None
        assert norm == pytest.approx(float(grad.norm()), rel=1e-5)


@on_ranks(2)
def test_hooks_that_run_meanwhile_see_pieces(context: RankContext) -> None:
    """torch starts such a backward without asking subclasses of tensors any more."""
    model = StreamShard(Stack(), precision=FP32)
    params = list(model.parameters())
    wanted, seen = params[0].norm().item(), []
    output = model(vector_batch(0, context.rank))
    output.register_hook(lambda grad: seen.append(params[0].norm().item()))
    torch.autograd.grad(output.square().mean(), params)
    assert seen == [wanted]


@on_ranks(2)
def test_two_models_in_one_graph(context: RankContext) -> None:
    """Each reduces its own."""
    models = [StreamShard(Stack(widths), precision=FP32) for widths in ((16, 16, 16), (16, 8, 8))]
    wanted = [StreamShard(Stack(widths), precision=FP32) for widths in ((16, 16, 16), (16, 8, 8))]
    for model, other in zip(models, wanted, strict=True):
        other.load_state_dict(model.full_state_dict(rank0_only=False))
    x = vector_batch(0, context.rank)
    params = [param for model in models for param in model.parameters()]
    grads = torch.autograd.grad((models[0](x) * models[1](x)).sum(), params)
    (wanted[0](x) * wanted[1](x)).sum().backward()
    for grad, param in zip(grads, (param for model in wanted for param in model.parameters()), strict=True):
        assert param.grad is not None
        assert bool((grad == param.grad).all())


@on_ranks(1, 2)
def test_a_failure_leaves_everything_as_it_was(context: RankContext) -> None:
    """A hook of the user's raises inside ``autograd.grad``: ``.grad`` is what it was, and training goes on right."""

    def step(model: Any, call: Call) -> Tensor:
        loss = call.backward(model(vector_batch(call.step, call.rank)).square().mean())
        held = [param.grad for param in model.parameters()]
        x = model(vector_batch(call.step, call.rank)).square().mean()
        hook = model.layers[1].register_full_backward_hook(_fail)
        y = model(vector_batch(call.step, call.rank)).square().mean()
        with pytest.raises(KeyError, match="on purpose"):
            torch.autograd.grad(y, list(model.parameters()))
        hook.remove()
        assert all(param.grad is grad for param, grad in zip(model.parameters(), held, strict=True))
        del x
        return loss

    assert_trains_like_plain(context, Stack, step)


def _fail(*_: object) -> None:
    raise KeyError("on purpose")


def _inside_no_sync(model: Any, x: Tensor) -> None:
    with model.no_sync():
        torch.autograd.grad(model(x).sum(), list(model.parameters()))


def _after_no_sync(model: Any, x: Tensor) -> None:
    with model.no_sync():
        model(x).sum().backward()
    torch.autograd.grad(model(x).sum(), list(model.parameters()))


def _batched(model: Any, x: Tensor) -> None:
    y = model(x)
    torch.autograd.grad(y, list(model.parameters()), torch.ones(2, *y.shape), is_grads_batched=True)


def _inside_backward(model: Any, x: Tensor) -> None:
    inner, params = model(x).sum(), list(model.parameters())
    outputs: list[Tensor] = []
    hook = model.layers[0].register_forward_hook(lambda *call: outputs.append(call[-1]))
    y = model(x)
    hook.remove()
    outputs[0].register_hook(lambda _: torch.autograd.grad(inner, params))
    y.sum().backward()


def _inside_forward(model: Any, x: Tensor) -> None:
    y, param = model(x), model.head.weight
    model.layers[0].register_forward_hook(lambda *_: torch.autograd.grad(y.sum(), [param]))
    model(x)


REFUSED: dict[str, tuple[Callable[[Any, Tensor], None], dict[str, Any], str]] = {
    "inside no_sync": (_inside_no_sync, SETTINGS["a slot each"], r"sharded parameter 'layers\.0.* inside no_sync\(\)"),
    "after no_sync": (_after_no_sync, SETTINGS["a slot each"], r"sharded parameter 'layers\.0.* inside no_sync\(\)"),
    "batched": (_batched, {}, r"sharded parameter 'layers\.0.*is_grads_batched=True"),
    "inside a backward": (_inside_backward, {}, r"sharded parameter 'layers\.0.*inside a forward or a backward"),
    "inside a forward": (_inside_forward, {}, r"sharded parameter 'head.weight' inside a forward or a backward"),
}


@on_ranks(2)
@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_answer_is_refused_by_name(context: RankContext, what: str) -> None:
    """And the next step is right."""
    ask, settings, message = REFUSED[what]
    model = StreamShard(Stack(), precision=FP32, **settings)
    before = full_weights(model)
    with pytest.raises(ShardingError, match=message):
        ask(model, vector_batch(0, context.rank))
    model.layers[0]._forward_hooks.clear()
    model.zero_grad()
    assert_same(full_weights(model), before, "weights")
    wanted = StreamShard(Stack(), precision=FP32, **settings)
    wanted.load_state_dict(before)
    for each in (model, wanted):
        stack_step(each, Call(0, context.rank, context.world_size, 1.0))
    assert_same(full_grads(model), full_grads(wanted), "gradients")


@on_ranks(2)
def test_create_graph_is_refused(context: RankContext) -> None:
    """Gradients that leave for other ranks cannot be differentiated again."""
    model = StreamShard(Stack(), precision=FP32)
    loss = model(vector_batch(0, context.rank)).square().mean()
    with pytest.raises(ShardingError, match="create_graph=True"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


@on_ranks(1)
def test_nothing_keeps_the_model(context: RankContext) -> None:
    """What is known about its parameters goes with it."""
    model = StreamShard(Stack(), precision=FP32)
    torch.autograd.grad(_loss(model, Call(0, 0, 1, 1.0)), list(model.parameters()))
    engine, param = weakref.ref(engine_inside(model)), weakref.ref(model.head.weight)
    del model
    gc.collect()
    assert engine() is None
    assert param() is None


@on_ranks(1)
def test_other_models_are_none_of_our_business(context: RankContext) -> None:
    """A plain model beside a sharded one is differentiated as ever."""
    StreamShard(Stack(), precision=FP32)
    plain = Layer()
    loss = plain(vector_batch(0, 0)).sum()
    of_layer = torch.autograd.grad(loss, list(plain.parameters()), create_graph=True)
    edge = torch.autograd.graph.get_gradient_edge(plain.linear.weight)
    (of_edge,) = torch.autograd.grad(plain(vector_batch(0, 0)).sum(), [edge])
    assert of_layer[0].requires_grad
    assert bool((of_layer[0] == of_edge).all())
    plain(vector_batch(0, 0)).sum().backward(inputs=[plain.linear.bias])
    assert plain.linear.weight.grad is None
    assert plain.linear.bias.grad is not None

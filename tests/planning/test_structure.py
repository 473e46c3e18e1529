"""Odd but legal models: what they are made of is kept, or the model is refused by name before anything changes."""

from __future__ import annotations

import abc
import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from streamshard import StreamShard
from streamshard.errors import ShardingError, StreamShardError
from streamshard.planning.structure import check_params
from tests.compare import EXACT, assert_same, full_weights
from tests.counts import counted_collectives
from tests.models import DIM, Layer, Stack, TinyConfig, TinyLM, vector_batch
from tests.ranks import Call, RankContext, on_ranks
from tests.reference import FP32, adamw, assert_trains_like_plain, lm_step, sgd, sharded_model, stack_step, train_stack

# ---------------------------------------------------------------------------------------------- the user's object


@on_ranks(1)
def test_one_rank_alone_gives_plain_pytorch_bit_by_bit_and_communicates_nothing(context: RankContext) -> None:
    """World size 1 is exact, not merely close."""
    model = assert_trains_like_plain(context, TinyLM, lm_step, checked=(2,), optimizer=adamw, tolerance=EXACT)
    with counted_collectives(model) as counts:
        lm_step(model, Call(0, 0, 1, 1.0))
        adamw(model).step()
    assert counts == {}


@on_ranks(2)
def test_the_model_is_the_same_object_of_a_class_of_the_same_name(context: RankContext) -> None:
    """It is an instance of StreamShard and of its own class; its parts, and other models of its class, are not.

    State-dict keys, the order of parameters, and the objects that an optimizer refers to stay, also after a step.
    """
    model, plain = TinyLM(TinyConfig(tied=True)), TinyLM(TinyConfig(tied=True))
    bound, unbound = inspect.signature(model.forward), inspect.signature(type(model).forward)
    blocks, before = list(model.blocks), dict(model.named_parameters())
    assert StreamShard(model, precision=FP32) is model
    assert isinstance(model, StreamShard) and isinstance(model, TinyLM)
    assert not any(isinstance(other, StreamShard) for other in (TinyLM(), nn.Linear(2, 2), model.blocks[0]))
    for attribute in ("__name__", "__qualname__", "__module__"):
        assert getattr(type(model), attribute) == getattr(TinyLM, attribute)
    assert inspect.signature(model.forward) == bound  # Trainers drop columns that forward does not name
    assert inspect.signature(type(model).forward) == unbound
    for called in (model, type(model)):
        assert "weight_slots" not in inspect.signature(called).parameters
    assert "units: 4 x Block" in repr(model)
    assert list(model.blocks) == blocks and model.head.weight is model.embedding.weight
    for _ in range(2):
        assert list(model.state_dict()) == list(plain.state_dict())
        for kind in ("parameters", "buffers", "modules"):
            names = [[name for name, _ in getattr(each, f"named_{kind}")()] for each in (model, plain)]
            assert names[0] == names[1]
        for name, param in model.named_parameters():
            assert param is before[name]
            assert isinstance(param, nn.Parameter) and param.is_leaf and param.requires_grad
        lm_step(model, context.call(0))


# ---------------------------------------------------------------------------------------------- memory


def test_parameters_that_share_memory_or_never_train_are_refused_by_name() -> None:
    """Two Parameters over one storage are tied in torch, and would be untied by their shards.

    Views that do not overlap are fine: flattened models, and loaded files. Nothing made in inference mode trains.
    """
    both, flat = r"layers\.0\.linear\.weight.*layers\.2\.linear\.weight.*share memory", torch.randn(2 * DIM * DIM)
    models: list[Any] = [Stack() for _ in range(5)]
    tied, overlapping, expanded, watched, apart = (model.layers for model in models)
    tied[2].linear.weight = nn.Parameter(tied[0].linear.weight.data)
    overlapping[0].linear.weight.data, overlapping[2].linear.weight.data = (
        flat[start : start + DIM * DIM].view(DIM, DIM) for start in (0, 4)
    )
    expanded[2].linear.weight = nn.Parameter(torch.randn(1, DIM).expand(DIM, DIM))
    watched[2].register_buffer("view", watched[2].linear.weight.detach().view(-1)[:3])
    apart[0].linear.weight.data, apart[1].linear.weight.data = flat.view(2, DIM, DIM)
    *models, model = models
    with torch.inference_mode():
        models.append(Stack())
    messages = [both, both, r"layers\.2\.linear\.weight.*expanded", r"'layers\.2\.\S*' and 'layers\.2\.\S*' share"]
    messages.append(r"layers\.0\.linear\.weight.*inference_mode.*build or load")
    for shared, message in zip(models, messages, strict=True):
        with pytest.raises(ShardingError, match=message):
            check_params(shared)
    assert check_params(model) == torch.device("cpu")
    assert check_params(TinyLM(TinyConfig(tied=True))) == torch.device("cpu")  # one Parameter under two names


# ---------------------------------------------------------------------------------------------- classes


class AbstractFirstLayer(abc.ABC, Layer):
    """Python adds its instances' ``__dict__`` to `abc.ABC`, not to `object`: another layout than nn.Module's."""


class Registered(Layer):
    """A base class that keeps a register of its subclasses, each with a key."""

    known: dict[str, type] = {}

    def __init_subclass__(cls, key: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        assert key not in Registered.known, "registered twice"
        Registered.known[key] = cls


class Mixin:
    """A plain class: its instances have a ``__dict__`` as those of nn.Module have."""


class RegisteredLayer(Mixin, Registered, key="layer"):
    """One of them."""


@on_ranks(2)
@pytest.mark.parametrize("layer", [RegisteredLayer, AbstractFirstLayer])
def test_classes_of_any_layout_and_metaclass_train_like_plain_pytorch(
    context: RankContext, layer: type[nn.Module]
) -> None:
    """As layers, as modules around layers, and as the root. The user's code does not see the classes that we make."""
    registered = dict(Registered.known)
    assert_trains_like_plain(context, lambda: nn.Sequential(*(layer() for _ in range(3))), stack_step)
    around = assert_trains_like_plain(
        context, lambda: nn.Sequential(layer(), layer()), stack_step, units=["0.linear", "1.linear"]
    )
    root = assert_trains_like_plain(context, layer, stack_step, units=["linear"])
    assert isinstance(root, StreamShard)
    for module in (around[0], root):  # type: ignore[index]  # a Sequential
        assert isinstance(module, layer)
        assert type(module).__name__ == layer.__name__
        with pytest.raises(ShardingError, match=f"{layer.__name__} is sharded"):
            copy.deepcopy(module)
        assert type(type(module)()) is layer
    assert Registered.known == registered


# ---------------------------------------------------------------------------------------------- devices, modes


@on_ranks(2)
def test_layers_of_a_sharded_model_cannot_be_cast(context: RankContext) -> None:
    """The layer's own ``.half()`` is refused as the model's is. A move casts nothing, whatever the default dtype."""
    model = sharded_model()
    torch.set_default_dtype(torch.bfloat16)
    model.to("cpu")
    for change in (lambda m: m.half(), lambda m: m.double(), lambda m: m.to(torch.bfloat16), lambda m: m.to("meta")):
        for module in (model, model.layers[0]):
            with pytest.raises(ShardingError, match=f"{type(module).__name__} is sharded by StreamShard"):
                change(module)
    before = full_weights(model)
    model.to_empty(device="cpu")  # behind FSDP2's fully_shard it makes room for initialisation
    assert_same(full_weights(model), before, "weights", EXACT)
    torch.set_default_dtype(torch.float32)
    stack_step(model, context.call(0))


@on_ranks(1, 2)
def test_inference_mode_leaves_nothing_behind_that_cannot_train(context: RankContext) -> None:
    """Sharding, the first forward, a look at whole weights inside of it: training afterwards is as ever."""
    model = Stack()
    model.register_buffer("seen", torch.zeros(3))
    with torch.inference_mode():
        StreamShard(model)
        model(vector_batch(0, context.rank))
        with model.summon_full_params():
            next(model.parameters()).data.mul_(2.0)
    with torch.inference_mode():
        model(vector_batch(0, context.rank))
    optimizer = sgd(model)
    train_stack(model, optimizer, context, steps=2)
    model.seen.add_(1)


@on_ranks(2)
def test_transforms_that_differentiate_are_refused_and_vmap_is_not(context: RankContext) -> None:
    """`torch.func.grad` and its kin cannot see through gathers; the error says what can."""
    model = sharded_model()
    x = vector_batch(0, context.rank)
    for transform in (
        lambda: torch.func.grad(lambda x: model(x).sum())(x),
        lambda: torch.func.grad(lambda x: StreamShard(Stack())(x).sum())(x),
        lambda: torch.func.jvp(model, (x,), (x,)),
        lambda: torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(x),
    ):
        with pytest.raises(ShardingError, match=r"torch\.func.*forward_ad"):
            transform()
    with pytest.raises(ShardingError, match="functional_call"):
        torch.func.functional_call(model, {"head.weight": torch.zeros(1, DIM)}, (x,))
    torch.testing.assert_close(torch.func.vmap(model)(x), model(x))
    stack_step(model, context.call(0))


# ---------------------------------------------------------------------------------------------- outside of a pass


@on_ranks(2)
def test_a_layers_forward_outside_of_a_pass_raises_and_names_the_parameter(context: RankContext) -> None:
    """The error is not about shapes that do not match. Printing a parameter works."""
    model = sharded_model(TinyLM)
    x = torch.zeros(2, 3, DIM)
    for call, name in (
        (lambda: model.blocks[0].up(x), "up"),
        (lambda: model.blocks[0].attention_norm(x), "attention_norm"),
        (lambda: model.blocks[0].forward(x), "attention_norm"),
        (lambda: model.blocks[0].attention.forward(x), "attention"),
    ):
        told = rf"'blocks\.0\.{name}[a-z.]*' outside of its model's forward: this rank"
        with pytest.raises(ShardingError, match=told):
            call()
    assert model.blocks[0].up.weight.ndim == 2
    assert model.blocks[0](x).shape == x.shape
    lm_step(model, context.call(0))


@on_ranks(2)
@pytest.mark.parametrize("hook", ["register_forward_hook", "register_full_backward_hook"])
def test_collecting_weights_during_a_pass_raises(context: RankContext, hook: str) -> None:
    """In hooks of forward and of backward; the step goes on."""
    model = sharded_model()
    whole = model.full_state_dict(rank0_only=False)
    calls: dict[str, Callable[[], object]] = {
        "state_dict": model.state_dict,
        "state_dict\\(\\) of": model.layers[1].state_dict,
        "full_state_dict": model.full_state_dict,
        "load_state_dict": lambda: model.load_state_dict(whole),
        "clip_grad_norm_": lambda: model.clip_grad_norm_(1.0),
        "summon_full_params": lambda: model.summon_full_params().__enter__(),
    }
    refused = []

    def try_all(*_: object) -> None:
        for name, call in calls.items():
            with pytest.raises(StreamShardError, match=f"{name}.* inside a forward or backward"):
                call()
            refused.append(name)

    getattr(model.layers[1], hook)(try_all)
    stack_step(model, context.call(0))
    assert refused == list(calls)
    assert_same(model.full_state_dict(rank0_only=False), whole, "weights")

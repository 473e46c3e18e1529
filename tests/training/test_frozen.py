"""Frozen parameters cost little: kept and gathered in the dtype that they came in, never reduced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from streamshard import StreamShard
from streamshard.comm.streams import Collective
from streamshard.errors import ShardingError
from tests.adversary import make_adversarial
from tests.models import DIM, Adapter, Stack, TinyLM
from tests.races import detect_races
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    EXACT,
    SETTINGS,
    Call,
    assert_same,
    assert_trains_like_plain,
    case,
    engine_inside,
    full_weights,
    heard_collectives,
    lm_step,
    stack_step,
    train_stack,
)
from tests.scenarios import BF16, PRECISIONS

HALF = torch.bfloat16


def freeze(model: nn.Module, *prefixes: str) -> nn.Module:
    """Freeze every parameter whose name starts with one of `prefixes`."""
    for name, p in model.named_parameters():
        if name.startswith(prefixes):
            p.requires_grad_(False)
    return model


def trainable_adamw(model: nn.Module) -> Optimizer:
    """The optimizer sees only what requires a gradient, as in fine-tuning scripts."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)


def adapted() -> nn.Module:
    """Layers of which only adapters train, the rest of them, and the head, in half precision."""
    model = Stack()
    layers: Any = model.layers
    for layer in layers:
        layer.linear = Adapter(layer.linear)
    model.head.requires_grad_(False)
    for param in model.parameters():
        if not param.requires_grad:
            param.data = param.to(HALF)
    return model


SCHEDULES: dict[str, dict[int, tuple[str, ...]]] = {
    "unfreeze a block": {0: ("blocks.1.",), 2: ()},
    "freeze part of a block and the edge": {0: (), 1: ("blocks.2.attention.", "embedding"), 3: ("head",)},
}


@on_ranks(2)
def test_parameters_can_be_frozen_and_unfrozen_after_sharding(context: RankContext) -> None:
    """`requires_grad_` takes effect at the next forward: gradual unfreezing freezes after `StreamShard(model)`."""
    for (name, schedule), settings in zip(SCHEDULES.items(), SETTINGS.values(), strict=True):

        def prepare(model: nn.Module, number: int, schedule: Any = schedule) -> None:
            if number in schedule:
                model.requires_grad_(True)
                freeze(model, *schedule[number] or ("nothing",))

        with case(name):
            assert_trains_like_plain(context, TinyLM, lm_step, prepare=prepare, steps=5, checked=(1, 2, 4), **settings)


@on_ranks()
@pytest.mark.parametrize(("world_size", "precision"), [(1, "bf16"), (2, "16-bit wire")])
def test_frozen_weights_are_computed_with_as_if_they_were_kept_in_fp32(context: RankContext, precision: str) -> None:
    """To the bit, against the same model whose base is frozen after it was sharded, and in fp32 main weights."""
    for settings in SETTINGS.values():
        found = []
        for frozen_first in (True, False):
            torch.manual_seed(3)
            model = adapted()
            trains = [param.requires_grad for param in model.parameters()]
            model.requires_grad_(True) if not frozen_first else None
            model = StreamShard(model, precision=PRECISIONS[precision], **settings)
            for param, is_trained in zip(model.parameters(), trains, strict=True):
                param.requires_grad_(is_trained)
            optimizer = trainable_adamw(model)
            with make_adversarial(model), detect_races(model) as races:
                train_stack(model, optimizer, context)
            assert races.accesses > 20
            found.append(full_weights(model))
        assert_same(*found, "weights", EXACT)


@on_ranks(2)
def test_frozen_parameters_take_two_bytes_over_n_and_are_not_reduced(context: RankContext) -> None:
    """Main weights and gradients, slots of gradients and moments are those of the adapters, padding aside."""
    model: Any = StreamShard(adapted(), precision=BF16)
    stack_step(model, Call(0, context.rank, 2, 1.0))
    report = model.memory_report()
    trained = 4 * 4 * DIM  # four layers with two adapters of rank 2
    frozen = 4 * (DIM * DIM + DIM) + DIM + 1
    padding = 4 * 2 * 8 * 4
    for name, wanted in (("main weights", 2 * trained), ("main grads", 2 * trained), ("frozen weights", frozen)):
        assert wanted <= report.held_bytes[name] <= wanted + padding, name
    assert report.held_bytes["grad slots"] <= 2 * trained + padding  # those of two layers
    assert report.adam_bytes == 2 * report.held_bytes["main grads"]
    with heard_collectives(engine_inside(model)) as heard:
        stack_step(model, Call(1, context.rank, 2, 1.0))
    assert len(heard[Collective.REDUCE_SCATTER]) == 4  # one flat parameter of each layer, none of the head


@on_ranks(1, 2)
def test_frozen_parameters_keep_their_dtype_and_values(context: RankContext) -> None:
    """Wherever they are seen: named, summoned, written back, loaded. Layers compute with them in half precision."""
    torch.manual_seed(3)
    model: Any = adapted()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    model = StreamShard(model, precision=BF16)
    assert {name: param.dtype for name, param in model.named_parameters()} == dtypes
    stack_step(model, Call(0, context.rank, context.world_size, 1.0))
    state = full_weights(model)
    assert {name: value.dtype for name, value in state.items()} == dtypes
    assert_same(state, wanted, "weights", EXACT)
    with model.summon_full_params():
        for name, param in model.named_parameters():
            assert param.dtype is dtypes[name]
            assert torch.equal(param, wanted[name])
            if name in frozen:
                param.data.mul_(2)
    doubled = {name: value * (2 if name in frozen else 1) for name, value in wanted.items()}
    assert_same(full_weights(model), doubled, "weights after writing", EXACT)
    model.load_state_dict(wanted)
    assert_same(full_weights(model), wanted, "weights after loading", EXACT)


@on_ranks(2)
def test_training_a_parameter_that_was_frozen_at_sharding_time_raises(context: RankContext) -> None:
    """Before a forward, or in one; frozen again, the model trains on."""
    model: Any = StreamShard(adapted(), precision=BF16)
    base = model.layers[1].linear.base
    unfreeze = model.layers[1].register_forward_pre_hook(lambda *_: base.bias.requires_grad_(True))
    for name in ("bias", "weight"):
        with pytest.raises(
            ShardingError,
            match=rf"'layers\.1\.linear\.base\.{name}' was frozen when .* Freeze it after StreamShard\(model\)",
        ):
            stack_step(model, Call(0, context.rank, context.world_size, 1.0))
        unfreeze.remove()
        model.zero_grad()
        base.requires_grad_(False)
        base.weight.requires_grad_(name == "bias")
    stack_step(model, Call(1, context.rank, context.world_size, 1.0))
    assert base.weight.grad is None and model.layers[1].linear.up.grad is not None

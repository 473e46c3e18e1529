"""Frozen parameters cost little: kept and gathered in the dtype that they came in, never reduced."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from streamshard import StreamShard
from streamshard.comm.streams import Collective
from streamshard.errors import ShardingError
from tests.adversary import make_adversarial
from tests.races import detect_races
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    ALL_SLOTS,
    EXACT,
    assert_same,
    engine_inside,
    full_weights,
    heard_collectives,
    stack_step,
    train_stack,
)
from tests.scenarios import BF16, PRECISIONS, AdapterStack


@on_ranks()
@pytest.mark.parametrize(("world_size", "precision"), [(1, "bf16"), (2, "16-bit wire")])
def test_frozen_weights_are_computed_with_as_if_they_were_kept_in_fp32(context: RankContext, precision: str) -> None:
    """To the bit, against the same model whose base is frozen after it was sharded, and in fp32 main weights."""
    for settings in ({}, ALL_SLOTS):
        found = []
        for frozen_first in (True, False):
            torch.manual_seed(3)
            model = AdapterStack()
            trains = [param.requires_grad for param in model.parameters()]
            model.requires_grad_(True) if not frozen_first else None
            model = StreamShard(model, precision=PRECISIONS[precision], **settings)
            for param, is_trained in zip(model.parameters(), trains, strict=True):
                param.requires_grad_(is_trained)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
            with make_adversarial(model), detect_races(model) as races:
                train_stack(model, optimizer, context)
            assert races.accesses > 20
            found.append(full_weights(model))
        assert_same(*found, "weights", EXACT)


@on_ranks(1, 2)
def test_frozen_parameters_keep_their_dtype_and_values(context: RankContext) -> None:
    """Wherever they are seen: named, summoned, written back, loaded. Layers compute with them, and reduce none."""
    torch.manual_seed(3)
    model: Any = AdapterStack()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    model = StreamShard(model, precision=BF16)
    assert {name: param.dtype for name, param in model.named_parameters()} == dtypes
    with heard_collectives(engine_inside(model)) as heard:
        stack_step(model, context.call(0))
    n_trained = 6 if context.world_size > 1 else 0  # one flat parameter of each layer that trains, and of the root
    assert len(heard[Collective.REDUCE_SCATTER]) == n_trained
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
    model: Any = StreamShard(AdapterStack(), precision=BF16)
    base = model.layers[1].linear.base
    unfreeze = model.layers[1].register_forward_pre_hook(lambda *_: base.bias.requires_grad_(True))
    for name in ("bias", "weight"):
        told = rf"'layers\.1\.linear\.base\.{name}' was frozen when .* Freeze it after StreamShard\(model\)"
        with pytest.raises(ShardingError, match=told):
            stack_step(model, context.call(0))
        unfreeze.remove()
        model.zero_grad()
        base.requires_grad_(False)
        base.weight.requires_grad_(name == "bias")
    stack_step(model, context.call(1))
    assert base.weight.grad is None and model.layers[1].linear.up.grad is not None

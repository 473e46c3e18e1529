"""`StreamShard(model)` shards in place: libraries that look at the model still see the one they know."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from streamshard import StreamShard
from streamshard.errors import StreamShardError
from tests.models import Stack, TinyConfig, TinyLM, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, Call, assert_same, counted_collectives, full_grads, lm_step, piece_of, sgd, stack_step


@on_ranks(1, 2)
def test_the_model_is_the_same_object_of_a_class_of_the_same_name(context: RankContext) -> None:
    """It is an instance of StreamShard and of its own class; its parts, and other models of its class, are not."""
    model = TinyLM()
    bound, unbound = inspect.signature(model.forward), inspect.signature(type(model).forward)
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


@on_ranks(1, 2)
@pytest.mark.parametrize("tied", [False, True])
def test_names_attributes_and_parameters_stay(context: RankContext, tied: bool) -> None:
    """Also after a step: state-dict keys, the order of parameters, and the objects that an optimizer refers to."""
    model, plain = TinyLM(TinyConfig(tied=tied)), TinyLM(TinyConfig(tied=tied))
    model.remark = ["mine"]  # type: ignore[assignment]
    config, remark, blocks, before = model.config, model.remark, list(model.blocks), dict(model.named_parameters())
    StreamShard(model, precision=FP32)
    assert model.config is config and model.remark is remark
    assert all(a is b for a, b in zip(model.blocks, blocks, strict=True))
    assert (model.head.weight is model.embedding.weight) is tied
    for _ in range(2):
        assert list(model.state_dict()) == list(plain.state_dict())
        for kind in ("parameters", "buffers", "modules"):
            names = [[name for name, _ in getattr(each, f"named_{kind}")()] for each in (model, plain)]
            assert names[0] == names[1]
        for name, param in model.named_parameters():
            assert param is before[name]
            assert isinstance(param, nn.Parameter) and param.is_leaf and param.requires_grad
        lm_step(model, Call(0, context.rank, context.world_size, 1.0))


@on_ranks(2, 3)
def test_outside_forward_parameters_are_fp32_shards_with_as_many_dims(context: RankContext) -> None:
    """`p.ndim >= 2` still tells matrices from biases, and the shards of all ranks make up the whole."""
    model, plain = TinyLM(), TinyLM()
    StreamShard(model)
    for _ in range(2):
        for (name, shard), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert shard.dtype == torch.float32, name
            assert shard.ndim == whole.ndim, name
            assert shard.grad is None or shard.grad.shape == shard.shape, name
            total = torch.tensor(piece_of(shard).numel())
            dist.all_reduce(total)
            assert int(total) == whole.numel(), name
        lm_step(model, Call(0, context.rank, context.world_size, 1.0))


@on_ranks(2)
def test_the_type_of_a_sharded_model_builds_an_ordinary_one(context: RankContext) -> None:
    """`type(model)(config)` is what libraries do to make another one like it. It can be copied, and sharded in turn."""
    model = StreamShard(TinyLM(), precision=FP32)
    fresh = type(model)(model.config)
    assert isinstance(fresh, TinyLM) and not isinstance(fresh, StreamShard)
    call = Call(0, context.rank, 2, 1.0)
    with counted_collectives(model) as counts:
        lm_step(fresh, call)
    assert counts == {}
    assert all(p.grad is not None for p in fresh.parameters())
    fresh.zero_grad()
    assert_same(copy.deepcopy(fresh).state_dict(), fresh.state_dict(), "copy of the ordinary model")
    second = StreamShard(fresh, precision=FP32)
    second.load_state_dict(model.full_state_dict(rank0_only=False))
    assert torch.equal(lm_step(model, call), lm_step(second, call))
    assert_same(full_grads(model), full_grads(second), "gradients")


@on_ranks(2)
def test_the_users_own_hooks_run_as_before(context: RankContext) -> None:
    """Module hooks fire once per call, and see full-shape weights inside forward."""
    model = TinyLM()
    seen: list[tuple[str, int]] = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, *_: object) -> None:
            seen.append((name, sum(p.numel() for p in module.parameters())))

        return hook

    block = model.blocks[1]
    sizes = [sum(p.numel() for p in part.parameters()) for part in (block.up, block.down)]
    block.up.register_forward_hook(note("up, before sharding"))
    StreamShard(model, precision=FP32)
    block.down.register_forward_pre_hook(note("down, after sharding"))
    lm_step(model, Call(0, context.rank, 2, 1.0))
    assert seen == [("up, before sharding", sizes[0]), ("down, after sharding", sizes[1])]


@on_ranks(2)
def test_full_parameters_can_be_summoned_and_written_back(context: RankContext) -> None:
    """Inside: original names, full shapes, fp32, the right values. Outside: the shards, changed only on request."""
    torch.manual_seed(4)
    plain = Stack()
    torch.manual_seed(4)
    model = StreamShard(Stack())
    shards = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    with model.summon_full_params():
        found = {name: p.detach().clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()  # without writeback this is lost
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert_same(found, dict(plain.named_parameters()), "summoned")
    with pytest.raises(KeyError, match="mine"), model.summon_full_params():
        raise KeyError("mine")
    for name, p in model.named_parameters():
        assert p is shards[name][0]
        assert torch.equal(p, shards[name][1]), name
    other = Stack()
    with model.summon_full_params(writeback=True):
        model.load_state_dict(other.state_dict())
    assert_same(model.full_state_dict(rank0_only=False), other.state_dict(), "weights")
    stack_step(model, Call(0, context.rank, 2, 1.0))


@on_ranks(2)
def test_casting_or_copying_a_sharded_model_raises(context: RankContext) -> None:
    """Main weights are fp32, and stay so: a step still changes them."""
    model = StreamShard(Stack(), precision=FP32)
    casts: list[Callable[[], Any]] = [model.bfloat16, model.half, model.double, lambda: model.to(torch.bfloat16)]
    for cast in casts:
        with pytest.raises(StreamShardError):
            cast()
    with pytest.raises(RuntimeError, match="full_state_dict|summon_full_params"):
        torch.optim.swa_utils.AveragedModel(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    before = model.full_state_dict(rank0_only=False)
    stack_step(model, Call(0, context.rank, 2, 1.0))
    sgd(model).step()
    after = model.full_state_dict(rank0_only=False)
    assert any(not torch.equal(after[name], before[name]) for name in before)
    assert model(vector_batch(0, 0)).dtype == torch.float32

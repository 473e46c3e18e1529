"""Training gives the numbers of plain PyTorch and of DDP, at every number of ranks; the model stays the same object."""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from streamshard import StreamShard
from tests.models import NormStack, Stack, TinyConfig, TinyLM, next_token_loss, token_batch, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    EXACT,
    FP32,
    Call,
    adamw,
    assert_same,
    assert_trains_like_ddp,
    assert_trains_like_plain,
    built,
    counted_collectives,
    full_grads,
    full_weights,
    lm_step,
    sgd,
    stack_step,
)


def uneven_step(model: nn.Module, call: Call) -> Tensor:
    """Ranks have batches of different sizes; the mean over ranks is of their means."""
    tokens = token_batch(call.step, call.rank, rows=1 + (call.rank + call.step) % 3, length=4 + call.rank)
    return call.backward(next_token_loss(model(tokens), tokens))


@on_ranks(3)
def test_batches_of_different_sizes_train_like_plain_pytorch(context: RankContext) -> None:
    """Losses, gradients and weights."""
    assert_trains_like_plain(context, TinyLM, uneven_step, optimizer=adamw)


@on_ranks(3)
def test_a_transformer_trains_like_ddp(context: RankContext) -> None:
    """The same against the real thing instead of the formula."""
    assert_trains_like_ddp(context, lambda: TinyLM(TinyConfig(tied=True, dropout=0.2)), lm_step)


@on_ranks(1)
def test_one_rank_alone_gives_plain_pytorch_bit_by_bit_and_communicates_nothing(context: RankContext) -> None:
    """World size 1 is exact, not merely close."""
    model = assert_trains_like_plain(context, TinyLM, lm_step, checked=(2,), optimizer=adamw, tolerance=EXACT)
    with counted_collectives(model) as counts:
        lm_step(model, Call(0, 0, 1, 1.0))
        adamw(model).step()
    assert counts == {}


@on_ranks(2)
def test_ranks_start_from_the_weights_and_buffers_of_rank_0(context: RankContext) -> None:
    """Ranks that built different weights train as rank 0's model. By default rank 0 alone gets the full state."""
    torch.manual_seed(100 + context.rank)
    model = NormStack()
    model.norms[0].running_mean.fill_(float(context.rank + 1))
    sharded = StreamShard(model, precision=FP32)
    torch.manual_seed(100)
    wanted = NormStack()
    wanted.norms[0].running_mean.fill_(1.0)
    assert_same(full_weights(sharded), wanted.state_dict(), "weights at the start", EXACT)
    assert bool(sharded.full_state_dict()) is (context.rank == 0)


@on_ranks(2)
def test_a_process_group_or_a_device_mesh_can_be_given(context: RankContext) -> None:
    """With each rank alone in its group nothing is averaged."""
    assert_trains_like_plain(context, Stack, stack_step, mesh=init_device_mesh("cpu", (2,)))
    groups = [dist.new_group([rank]) for rank in range(2)]
    alone = RankContext(0, 1, context.device)

    def step(model: nn.Module, call: Call) -> Tensor:
        return stack_step(model, call._replace(rank=context.rank))

    assert_trains_like_plain(alone, Stack, step, mesh=groups[context.rank])


@on_ranks(2)
def test_two_sharded_models_train_in_one_loss(context: RankContext) -> None:
    """A model that reads the other's output, and a teacher under no_grad between forward and backward."""

    def loss_of(first: nn.Module, second: nn.Module, teacher: nn.Module, x: Tensor) -> Tensor:
        out = second(first(x))
        with torch.no_grad():
            goal = teacher(x)
        loss: Tensor = (out - goal).square().mean()
        return loss

    plains, parts = ([built(), built(lambda: Stack((1, 8, 8, 4))), built()] for _ in range(2))
    models = [StreamShard(part, precision=FP32) for part in parts]
    for number in range(3):
        for rank in range(2):
            (loss_of(*plains, vector_batch(number, rank)) / 2).backward()
        loss_of(*models, vector_batch(number, context.rank)).backward()
        for sharded, wanted in zip(models, plains, strict=True):
            assert_same(full_grads(sharded), full_grads(wanted), "gradients")
            for model in (sharded, wanted):
                sgd(model).step()
                model.zero_grad()


@on_ranks(2)
def test_an_optimizer_built_before_sharding_trains_the_sharded_model(context: RankContext) -> None:
    """Parameters stay the same objects. Weights that came in bf16 become fp32 main weights of the same values."""
    torch.manual_seed(2)
    plain = Stack().bfloat16().float()
    torch.manual_seed(2)
    model = Stack().bfloat16()
    optimizer, plain_optimizer = adamw(model), adamw(plain)
    sharded = StreamShard(model, precision=FP32)
    assert {p.dtype for p in sharded.parameters()} == {torch.float32}
    for number in range(3):
        for rank in range(2):
            stack_step(plain, Call(number, rank, 2, 0.5))
        stack_step(sharded, Call(number, context.rank, 2, 1.0))
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    assert_same(full_weights(sharded), plain.state_dict(), "weights")


# -- the model stays the user's object --------------------------------------------------------------------------------


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
        lm_step(model, Call(0, context.rank, context.world_size, 1.0))

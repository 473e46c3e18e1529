"""Training gives the numbers of plain PyTorch and of DDP, at every number of ranks."""

from __future__ import annotations

import pytest
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
    Step,
    adamw,
    assert_same,
    assert_trains_like_ddp,
    assert_trains_like_plain,
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


@on_ranks(1, 2, 3, 4)
def test_a_transformer_trains_like_plain_pytorch(context: RankContext) -> None:
    """Losses, gradients and weights of four steps with momentum."""
    assert_trains_like_plain(context, TinyLM, lm_step)


@on_ranks(2)
def test_a_transformer_trains_like_plain_pytorch_with_adamw(context: RankContext) -> None:
    """Adam's state lives in shards and gives the same updates."""
    assert_trains_like_plain(context, TinyLM, lm_step, optimizer=adamw)


@on_ranks(2)
def test_a_longer_run_does_not_drift(context: RankContext) -> None:
    """Errors that add up slowly show after twenty steps of which only the last is collected."""
    assert_trains_like_plain(context, Stack, stack_step, steps=20, checked=(19,), optimizer=adamw)


@on_ranks(2, 3)
def test_ranks_with_batches_of_different_sizes_train_like_plain_pytorch(context: RankContext) -> None:
    """The reduction is the mean over ranks, not over samples, as in DDP."""
    assert_trains_like_plain(context, TinyLM, uneven_step)


@on_ranks()
@pytest.mark.parametrize(("world_size", "tied"), [(2, False), (3, True)])
def test_a_transformer_trains_like_ddp(context: RankContext, tied: bool) -> None:
    """The same against the real thing instead of the formula."""
    assert_trains_like_ddp(context, lambda: TinyLM(TinyConfig(tied=tied, dropout=0.2)), lm_step)


@on_ranks(1)
def test_one_rank_alone_gives_plain_pytorch_bit_by_bit(context: RankContext) -> None:
    """World size 1 is exact, not merely close."""
    assert_trains_like_plain(context, TinyLM, lm_step, steps=6, checked=(2, 5), optimizer=adamw, tolerance=EXACT)


@on_ranks(1)
def test_one_rank_alone_communicates_nothing(context: RankContext) -> None:
    """No collective in a whole training step."""
    model = StreamShard(TinyLM(), precision=FP32)
    optimizer = adamw(model)
    for number in range(2):
        with counted_collectives(model) as counts:
            lm_step(model, Call(number, 0, 1, 1.0))
            optimizer.step()
            optimizer.zero_grad()
        assert counts == {}


@on_ranks(2)
def test_the_reference_counts_collectives(context: RankContext) -> None:
    """The counter behind the test above sees collectives when there are some."""
    model = StreamShard(TinyLM(), precision=FP32)
    with counted_collectives(model) as counts:
        lm_step(model, Call(0, context.rank, 2, 1.0))
    assert sum(counts.values()) > 0


@on_ranks(2, 3)
def test_ranks_start_from_the_weights_and_buffers_of_rank_0(context: RankContext) -> None:
    """Ranks that built different weights train as rank 0's model."""
    torch.manual_seed(100 + context.rank)
    model = NormStack()
    model.norms[0].running_mean.fill_(float(context.rank + 1))
    sharded = StreamShard(model, precision=FP32)
    torch.manual_seed(100)
    wanted = NormStack()
    wanted.norms[0].running_mean.fill_(1.0)
    assert_same(full_weights(sharded), wanted.state_dict(), "weights at the start", EXACT)


@on_ranks(3)
def test_two_runs_are_equal_bit_by_bit(context: RankContext) -> None:
    """Nothing depends on timing: the same program gives the same bits, where sums have an order."""
    assert_same(_weights_after_training(context), _weights_after_training(context), "second run", EXACT)


def _weights_after_training(context: RankContext) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = StreamShard(TinyLM(TinyConfig(dropout=0.1)), precision=FP32)
    optimizer = adamw(model)
    for number in range(4):
        torch.manual_seed(number)
        lm_step(model, Call(number, context.rank, context.world_size, 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model)


@on_ranks(2)
def test_all_ranks_hold_the_same_full_weights(context: RankContext) -> None:
    """What `full_state_dict` gives on rank 1 equals what it gives on rank 0."""
    model = assert_trains_like_plain(context, Stack, stack_step)
    for name, value in full_weights(model).items():
        both = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(both, value)
        assert torch.equal(both[0], both[1]), name


@on_ranks(2)
def test_full_state_dict_is_given_to_rank_0_only_unless_asked(context: RankContext) -> None:
    """By default the other ranks get an empty dict and need no memory for it."""
    model = StreamShard(Stack(), precision=FP32)
    assert bool(model.full_state_dict()) is (context.rank == 0)
    assert list(model.full_state_dict(rank0_only=False)) == list(Stack().state_dict())


@on_ranks(2)
def test_a_process_group_can_be_given_as_mesh(context: RankContext) -> None:
    """Each rank alone in its group: nothing is averaged."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    alone = RankContext(0, 1, context.device)

    def step(model: nn.Module, call: Call) -> Tensor:
        return stack_step(model, call._replace(rank=context.rank))

    assert_trains_like_plain(alone, Stack, step, mesh=groups[context.rank])


@on_ranks(2)
def test_a_one_dimensional_device_mesh_can_be_given(context: RankContext) -> None:
    """The shard group is the mesh's."""
    mesh = init_device_mesh("cpu", (context.world_size,))
    assert_trains_like_plain(context, Stack, stack_step, mesh=mesh)


@on_ranks(2)
def test_two_sharded_models_train_in_one_loss(context: RankContext) -> None:
    """A model that reads the other's output; both get their gradients from one backward."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Stack(), Stack((1, 8, 8, 4))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x))
            return out

    torch.manual_seed(5)
    plain = Pair()
    torch.manual_seed(5)
    parts = Pair()
    first, second = StreamShard(parts.first, precision=FP32), StreamShard(parts.second, precision=FP32)
    for number in range(3):
        for rank in range(2):
            stack_step(plain, Call(number, rank, 2, 0.5))
        second(first(vector_batch(number, context.rank))).square().mean().backward()
        assert_same(full_grads(first), full_grads(plain.first), "first model's gradients")
        assert_same(full_grads(second), full_grads(plain.second), "second model's gradients")
        for p in (*plain.parameters(), *first.parameters(), *second.parameters()):
            if p.grad is not None:
                with torch.no_grad():
                    p.sub_(p.grad, alpha=0.1)
                p.grad = None


@on_ranks(2)
def test_a_teacher_under_no_grad_does_not_disturb_its_student(context: RankContext) -> None:
    """Distillation: the teacher runs between the student's forward and backward."""
    torch.manual_seed(11)
    plain_teacher = Stack()
    torch.manual_seed(11)
    teacher = StreamShard(Stack(), precision=FP32)

    def step_with(teach: nn.Module) -> Step:
        def step(model: nn.Module, call: Call) -> Tensor:
            x = vector_batch(call.step, call.rank)
            out = model(x)
            with torch.no_grad():
                goal = teach(x)
            return call.backward((out - goal).square().mean())

        return step

    def step(model: nn.Module, call: Call) -> Tensor:
        return step_with(teacher if isinstance(model, StreamShard) else plain_teacher)(model, call)

    assert_trains_like_plain(context, Stack, step)


@on_ranks(2)
def test_an_optimizer_built_before_sharding_trains_the_sharded_model(context: RankContext) -> None:
    """Parameters stay the same objects, so the optimizer still holds the right ones."""
    torch.manual_seed(2)
    plain = Stack()
    torch.manual_seed(2)
    model = Stack()
    optimizer = adamw(model)
    plain_optimizer = adamw(plain)
    sharded = StreamShard(model, precision=FP32)
    for number in range(3):
        for rank in range(2):
            stack_step(plain, Call(number, rank, 2, 0.5))
        stack_step(sharded, Call(number, context.rank, 2, 1.0))
        optimizer.step()
        plain_optimizer.step()
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
    assert_same(full_weights(sharded), plain.state_dict(), "weights")


@on_ranks(2)
def test_a_model_can_be_sharded_in_half_precision_storage(context: RankContext) -> None:
    """Weights that were loaded in bf16 become fp32 main weights of the same values."""
    torch.manual_seed(2)
    wanted = Stack().bfloat16().float()
    torch.manual_seed(2)
    model = StreamShard(Stack().bfloat16(), precision=FP32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for rank in range(2):
        stack_step(wanted, Call(0, rank, 2, 0.5))
    stack_step(model, Call(0, context.rank, 2, 1.0))
    sgd(wanted).step()
    sgd(model).step()
    assert_same(full_weights(model), wanted.state_dict(), "weights")

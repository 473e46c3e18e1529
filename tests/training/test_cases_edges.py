"""What lies outside the repeated layers, and layers that are not alike: sizes, embeddings, tied weights, buffers."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from streamshard import Precision, StreamShard
from streamshard.inspect import engine_inside
from tests.models import (
    Block,
    Layer,
    NormStack,
    Stack,
    TinyConfig,
    TinyLM,
    next_token_loss,
    token_batch,
    vector_batch,
)
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    EXACT,
    FP32,
    Call,
    adamw,
    assert_same,
    assert_trains_like_ddp,
    assert_trains_like_plain,
    full_weights,
    lm_step,
    sgd,
    stack_step,
)


@on_ranks(2, 3)
@pytest.mark.parametrize(
    "widths",
    [(16, 3, 40, 1, 24, 16), (16, 64, 8), (16, 8, 8, 8, 64)],
    ids=["all different", "largest first", "largest last"],
)
def test_layers_of_different_sizes_share_the_slots(context: RankContext, widths: tuple[int, ...]) -> None:
    """Slots fit the largest layer, and none sees another's leftovers."""
    assert_trains_like_plain(context, lambda: Stack(widths), stack_step)


@on_ranks(3)
def test_layers_smaller_than_the_number_of_ranks_train(context: RankContext) -> None:
    """Some ranks own nothing of a layer."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 1), *(Layer(1, 1, bias=False) for _ in range(3)), nn.LayerNorm(1))

    assert_trains_like_plain(context, build, stack_step, optimizer=adamw)


@on_ranks(1, 2, 3)
def test_an_embedding_far_larger_than_a_block_trains(context: RankContext) -> None:
    """2,000 rows against blocks of a few thousand elements."""
    config = TinyConfig(vocabulary=2000)

    def step(model: nn.Module, call: Call) -> Tensor:
        tokens = token_batch(call.step, call.rank, vocabulary=2000)
        return call.backward(next_token_loss(model(tokens), tokens))

    assert_trains_like_plain(context, lambda: TinyLM(config), step, steps=3, checked=(0, 2))


@on_ranks(1, 2, 3)
def test_tied_embedding_and_head_train(context: RankContext) -> None:
    """One parameter under two names: gradients of both uses add up, both names are in the state dict."""
    model = assert_trains_like_plain(context, lambda: TinyLM(TinyConfig(tied=True)), lm_step, optimizer=adamw)
    state = full_weights(model)
    assert torch.equal(state["head.weight"], state["embedding.weight"])


class WeightShared(Stack):
    """Layers 0 and 3 have the same weight."""

    def __init__(self) -> None:
        super().__init__()
        first, last = self.layers[0], self.layers[3]
        assert isinstance(first, Layer) and isinstance(last, Layer)
        last.linear.weight = first.linear.weight


class LinearShared(Stack):
    """Layers 0 and 3 have the same linear layer."""

    def __init__(self) -> None:
        super().__init__()
        first, last = self.layers[0], self.layers[3]
        assert isinstance(first, Layer) and isinstance(last, Layer)
        last.linear = first.linear


class ActivationShared(nn.Module):
    """All layers have the same activation module, which has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        activation = nn.Tanh()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), activation) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> the same"""
        for layer in self.layers:
            x = layer(x)
        return x


@on_ranks(1, 2, 3)
def test_a_weight_shared_by_two_layers_trains(context: RankContext) -> None:
    """It cannot be in two units; both layers still use the one weight."""
    assert_trains_like_plain(context, WeightShared, stack_step)


@on_ranks(2)
def test_a_module_shared_by_two_layers_trains(context: RankContext) -> None:
    """Its parameters are shared, as in the test above."""
    assert_trains_like_plain(context, LinearShared, stack_step)


@on_ranks(2)
def test_an_activation_shared_by_all_layers_is_no_overlap(context: RankContext) -> None:
    """A module without parameters has nothing to shard."""
    assert_trains_like_plain(context, ActivationShared, stack_step)


class TiedToRoot(Stack):
    """The root uses the weight of a layer's own linear as its input projection."""

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 1]"""
        layer: Any = self.layers[2]
        return super().forward(F.linear(x, layer.linear.weight))


@on_ranks(2)
def test_a_layers_weight_used_directly_by_the_roots_forward_is_right_or_an_error(context: RankContext) -> None:
    """It is a shard while its layer does not run; what must not happen is a wrong result."""
    model = StreamShard(TiedToRoot(), precision=FP32)
    torch.manual_seed(1)
    x = vector_batch(0, context.rank)
    whole = TiedToRoot()
    whole.load_state_dict(model.full_state_dict(rank0_only=False))
    try:
        found = model(x)
    except RuntimeError as error:
        assert "shape" in str(error) or "size" in str(error) or "layers.2" in str(error)
    else:
        assert_same({"out": found}, {"out": whole(x)}, "forward")


class RootUsesParts(nn.Module):
    """The root's forward reads parameters of its own and of modules that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((16,), 1.2))
        self.shift = nn.Parameter(torch.zeros(16))
        self.table = nn.Embedding(4, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.extras = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(0.7))})
        self.list = nn.ParameterList([nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16))])
        self.out = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 1]"""
        x = x * self.gain + self.table.weight[1]
        for layer in self.layers:
            x = layer(x) * self.extras["scale"]
        x = x + self.shift + self.list[0] * self.list[1]
        return F.linear(x, self.out.weight, self.out.bias)


@on_ranks(1, 2, 3)
def test_parameters_used_directly_by_the_roots_forward_train(context: RankContext) -> None:
    """Before, between and after the layers; scalars, lists and dicts of parameters, weights of uncalled modules."""
    assert_trains_like_plain(context, RootUsesParts, stack_step)


class Wrapper(nn.Module):
    """The model proper is one level down, as in transformers' ForCausalLM classes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = RootUsesParts()

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 1]"""
        out: Tensor = self.inner(x)
        return out


@on_ranks(2)
def test_parameters_used_directly_one_level_below_the_root_train(context: RankContext) -> None:
    """Whoever is not inside a unit belongs to the edge, at any depth."""
    assert_trains_like_plain(context, Wrapper, stack_step)


# ---------------------------------------------------------------------------------------------- buffers


@on_ranks(1, 2, 3)
def test_batch_norm_trains_like_ddp(context: RankContext) -> None:
    """Running statistics do not change training; losses, gradients and weights are DDP's."""
    assert_trains_like_ddp(context, NormStack, stack_step)


@on_ranks(2, 3)
def test_batch_norm_statistics_are_rank_0s_on_all_ranks(context: RankContext) -> None:
    """After training, evaluation on any rank uses the statistics that DDP would use."""
    torch.manual_seed(7)
    ddp = DistributedDataParallel(NormStack())
    torch.manual_seed(7)
    model = StreamShard(NormStack(), precision=FP32)
    optimizers = sgd(ddp.module), sgd(model)
    for number in range(3):
        for trained, optimizer in zip((ddp, model), optimizers, strict=True):
            stack_step(trained, Call(number, context.rank, context.world_size, 1.0))
            optimizer.step()
            optimizer.zero_grad()
    x = vector_batch(99, 0)
    with torch.no_grad():
        wanted, found = ddp.eval()(x), model.eval()(x)
    assert_same({"out": found}, {"out": wanted}, "evaluation")
    wanted_buffers = dict(ddp.module.named_buffers())
    assert_same(dict(model.named_buffers()), wanted_buffers, "buffers")
    state = full_weights(model)
    assert_same({name: state[name] for name in wanted_buffers}, wanted_buffers, "buffers in the state dict")


@on_ranks(2)
def test_small_weights_are_sent_together(context: RankContext) -> None:
    """One message for a unit, but for what is large; in whatever dtypes they are, all ranks begin with rank 0's."""
    torch.manual_seed(context.rank)
    model = Stack((16, 600, 600, 4))
    model.layers[0].linear.bias.data = model.layers[0].linear.bias.data.bfloat16()
    wanted = [model.state_dict()]
    dist.broadcast_object_list(wanted, 0)
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as sent:
        sharded = StreamShard(model, precision=FP32)
    assert len(sent.mock_calls) == len(engine_inside(sharded).units) + 1  # a matrix of 600 x 600 goes by itself
    assert_same(full_weights(sharded), wanted[0], "weights", EXACT)


@on_ranks(2, 3)
def test_buffers_are_whole_and_equal_on_all_ranks(context: RankContext) -> None:
    """They are not sharded, keep shape and dtype, and start as rank 0's."""
    torch.manual_seed(context.rank)
    model = NormStack()
    for norm in model.norms:
        norm.running_mean.normal_()
        norm.num_batches_tracked.fill_(10 + context.rank)
    model.register_buffer("angles", torch.rand(5, 3), persistent=False)
    shapes = {name: (b.shape, b.dtype) for name, b in model.named_buffers()}
    StreamShard(model)
    assert {name: (b.shape, b.dtype) for name, b in model.named_buffers()} == shapes
    for name, value in model.named_buffers():
        first = value.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, value), name
    assert "angles" not in full_weights(model)
    assert "norms.0.running_mean" in full_weights(model)


class WithAngles(Stack):
    """A rotary-like table that the layers' input is turned by; not in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.linspace(0.0, 1.0, 16) + 1e-4, persistent=False)
        self.angles: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 1]"""
        return super().forward(x * self.angles.cos())


@on_ranks(1, 2)
def test_fixed_buffers_are_used_as_they_are(context: RankContext) -> None:
    """And keep their fp32 although weights are bf16, unless `buffer_dtype` says otherwise."""
    assert_trains_like_plain(context, WithAngles, stack_step)
    model = StreamShard(WithAngles())
    assert model.angles.dtype == torch.float32
    assert torch.equal(model.angles, WithAngles().angles)
    other = StreamShard(WithAngles(), precision=Precision(buffer_dtype=torch.bfloat16))
    assert other.angles.dtype == torch.bfloat16


@on_ranks(2)
def test_a_buffer_that_forward_replaces_stays_replaced(context: RankContext) -> None:
    """Counting calls by assignment is the user's right."""

    class Counting(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.calls: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return super().forward(x)

    model = assert_trains_like_plain_calls(context, Counting)
    assert int(model.calls) == 4  # type: ignore[arg-type]


def assert_trains_like_plain_calls(context: RankContext, build: Any) -> nn.Module:
    """Plain PyTorch plays all ranks in turn and counts more calls: only parameters are compared."""
    model = StreamShard(build(), precision=FP32)
    optimizer = sgd(model)
    for number in range(4):
        stack_step(model, Call(number, context.rank, context.world_size, 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return model


@on_ranks(2)
def test_blocks_with_buffers_keep_them_in_place(context: RankContext) -> None:
    """A buffer of a layer stays registered under its name while weights come and go."""

    class Masked(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("gate", torch.rand(16) + 0.5)
            self.gate: Tensor

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x * self.gate, mask)

    class Model(TinyLM):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Masked() for _ in range(3))

    assert_trains_like_plain(context, Model, lm_step)

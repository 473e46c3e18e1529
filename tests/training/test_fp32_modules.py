"""Parts of a half-precision model that compute in fp32: what is listed, what a class keeps, norms with statistics."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamshard import ConfigError, Precision, StreamShard
from streamshard.inspect import engine_inside
from streamshard.inspect.adversary import make_adversarial
from streamshard.inspect.races import detect_races
from tests.models import DIM, NormStack, Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    EXACT,
    FP32,
    Call,
    Tolerance,
    assert_same,
    assert_trains_like_plain,
    full_grads,
    full_weights,
    sgd,
    stack_step,
)
from tests.scenarios import BF16, PRECISIONS, over_sockets

HALF = torch.bfloat16
ONE_EACH: dict[str, Any] = {"weight_slots": "all", "grad_slots": "all"}
NEAR = Tolerance(5e-2, 5e-3)  # bf16 in most layers


class Normed(nn.Module):
    """A residual layer with a norm, and a gate of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.linear = nn.Linear(DIM, DIM)
        self.gate = nn.Linear(DIM, DIM, bias=False)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> [rows, DIM]"""
        y = self.norm(x)
        self.seen = [x.dtype, y.dtype, self.norm.weight.dtype, self.linear.weight.dtype, self.gate.weight.dtype]
        return x + torch.tanh(self.linear(y)) * torch.sigmoid(self.gate(y))


def _instance_norm(dim: int) -> nn.Module:
    return nn.InstanceNorm2d(dim, affine=True, track_running_stats=True)


class Gated(Stack):
    """Of such layers."""

    def __init__(self) -> None:
        super().__init__((DIM,) * 5)
        self.layers = nn.ModuleList(Normed() for _ in range(4))


def dtypes_computed_with(model: nn.Module) -> dict[str, torch.dtype]:
    """By parameter, that of its compute view."""
    units = engine_inside(model).units
    return {param.name: view.dtype for unit in units for param, view in zip(unit.params, unit.views, strict=True)}


def in_fp32(model: nn.Module) -> set[str]:
    return {name for name, dtype in dtypes_computed_with(model).items() if dtype is torch.float32}


# -- which ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize(
    ("entries", "parts"),
    [
        (["norm"], ["norm"]),
        ([nn.LayerNorm], ["norm"]),
        (("gate", nn.LayerNorm), ["gate", "norm"]),
        (["layers.1.gate"], ["layers.1.gate"]),
        (["linear.bias"], ["linear.bias"]),
        (["head"], ["head"]),
    ],
)
def test_what_is_listed_computes_in_fp32(context: RankContext, entries: Any, parts: list[str]) -> None:
    """By whole words of names, of modules and parameters, and by class. It trains."""
    model = StreamShard(Gated(), precision=Precision(fp32_modules=entries))
    assert in_fp32(model) == {name for name, _ in model.named_parameters() if any(part in name for part in parts)}
    stack_step(model, Call(0, context.rank, 2, 1.0)) if "linear.bias" not in parts else None


@on_ranks(1)
def test_what_the_model_does_not_have_is_named(context: RankContext) -> None:
    """A part of a word is none."""
    for entry, said in (("nor", "'nor'"), ("layers.9", "'layers.9'"), (nn.BatchNorm1d, "of class BatchNorm1d")):
        with pytest.raises(ConfigError, match=f"Gated has no module or parameter {said}"):
            StreamShard(Gated(), precision=Precision(fp32_modules=[entry]))


@pytest.mark.parametrize("entries", ["norm", [3], [""], [nn.Linear(1, 1)], nn.LayerNorm])
def test_entries_are_names_and_classes(entries: Any) -> None:
    """Nothing else, and several of them."""
    with pytest.raises(ConfigError, match="fp32_modules=.*: wanted a list or tuple of names and of module classes"):
        Precision(fp32_modules=entries)


@on_ranks(2)
def test_in_a_model_of_fp32_there_is_nothing_to_keep(context: RankContext) -> None:
    """One segment a unit, as ever."""
    precision = Precision(param_dtype=torch.float32, fp32_modules=["norm"])
    model = StreamShard(Gated(), precision=precision)
    assert all(len(unit.segments) == 1 for unit in engine_inside(model).units)


# -- how ------------------------------------------------------------------------------------------------------------


@on_ranks(1, 2)
def test_what_is_listed_is_given_fp32_and_gives_on_what_it_was_given(context: RankContext) -> None:
    """Inside a layer nothing else notices."""
    torch.manual_seed(3)
    plain: Any = Gated()
    torch.manual_seed(3)
    model: Any = StreamShard(Gated(), precision=Precision(fp32_modules=[nn.LayerNorm, "gate"]))
    inputs = vector_batch(0, context.rank)
    with torch.no_grad():
        found = model(inputs)
        x = inputs.to(HALF)
        plain.to(HALF)
        for layer in plain.layers:
            y = layer.norm.float()(x.float()).to(HALF)
            x = x + torch.tanh(layer.linear(y)) * torch.sigmoid(layer.gate.float()(y.float()).to(HALF))
        wanted = plain.head(x)
    assert_same({"outputs": found}, {"outputs": wanted}, "forward", Tolerance(1e-2, 1e-2))
    assert all(layer.seen == [HALF, HALF, torch.float32, HALF, torch.float32] for layer in model.layers)


@on_ranks(2)
def test_a_unit_in_fp32_gives_fp32(context: RankContext) -> None:
    """A head's outputs are not rounded."""
    units = ["layers.0", "layers.1", "layers.2", "layers.3", "head"]
    model = StreamShard(Gated(), units, precision=Precision(fp32_modules=["head", "layers.1"]))
    assert model(vector_batch(0, context.rank)).dtype is torch.float32
    layers: Any = model.layers
    assert [layer.seen[0] for layer in layers] == [HALF, torch.float32, HALF, HALF]
    stack_step(model, Call(0, context.rank, 2, 1.0))


@on_ranks(2)
def test_inputs_are_left_alone_on_request(context: RankContext) -> None:
    """`cast_inputs=False` is of everything."""
    model = StreamShard(Gated(), precision=Precision(fp32_modules=["norm"], cast_inputs=False))
    layers: Any = model.layers
    assert all("forward" not in layer.norm.__dict__ for layer in layers)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("slots", [{}, ONE_EACH, {"min_unit_size": 3000}], ids=["ZeRO-3", "ZeRO-1", "pairs"])
def test_a_model_in_fp32_altogether_trains_like_plain_pytorch(context: RankContext, slots: dict[str, Any]) -> None:
    """All of its modules are listed: other segments, the same numbers."""
    precision = Precision(fp32_modules=[Normed, "head"], cast_inputs=True)
    assert_trains_like_plain(context, Gated, stack_step, precision=precision, units=[Normed], **slots, tolerance=NEAR)


@on_ranks(1, 2)
@pytest.mark.parametrize("precision", ["bf16", "16-bit wire", "16-bit"])
@pytest.mark.parametrize("slots", [{}, ONE_EACH], ids=["ZeRO-3", "ZeRO-1"])
def test_mixed_units_train_alike_whenever_messages_arrive(
    context: RankContext, slots: dict[str, Any], precision: str
) -> None:
    """In each way of reducing, over sockets and late; gradients of what is in fp32 are reduced in fp32."""
    settings = PRECISIONS[precision]
    mixed = Precision(reduce_dtype=settings.reduce_dtype, grad_dtype=settings.grad_dtype, fp32_modules=["norm", "gate"])
    found: list[dict[str, Tensor]] = []
    for way in (contextlib.nullcontext, over_sockets, contextlib.nullcontext):
        torch.manual_seed(3)
        with way():
            model = StreamShard(Gated(), precision=mixed, **slots)
        assert {(segment.kind.compute_dtype, segment.kind.grad_dtype) for segment in engine_inside(model).segments} == {
            (HALF, settings.slot_grad_dtype),
            (torch.float32, torch.float32),
        }
        optimizer = sgd(model)
        with make_adversarial(model) if len(found) == 2 else contextlib.nullcontext(), detect_races(model) as races:
            for number in range(3):
                stack_step(model, Call(number, context.rank, context.world_size, 1.0))
                optimizer.step()
                optimizer.zero_grad()
        assert races.accesses > 50
        found.append(full_weights(model))
    assert_same(found[1], found[0], "weights over sockets", EXACT)
    assert_same(found[2], found[0], "weights of late ranks", EXACT)


@on_ranks(2)
def test_gradients_of_mixed_units_are_near_those_of_fp32(context: RankContext) -> None:
    """Of all parameters, each in its place."""
    grads = []
    for precision in (FP32, Precision(fp32_modules=[nn.LayerNorm, "gate"])):
        torch.manual_seed(3)
        model = StreamShard(Gated(), precision=precision)
        stack_step(model, Call(0, context.rank, 2, 1.0))
        grads.append(full_grads(model))
    assert_same(grads[1], grads[0], "gradients", NEAR)


# -- norms with statistics ------------------------------------------------------------------------------------------


@on_ranks(1, 2)
def test_batch_norm_trains_in_a_half_precision_model(context: RankContext) -> None:
    """Its weights and statistics are fp32, unasked; its inputs and outputs are not touched."""
    torch.manual_seed(3)
    plain: Any = NormStack()
    torch.manual_seed(3)
    model: Any = StreamShard(NormStack(), precision=BF16)
    norms = {name for name, _ in model.named_parameters() if name.startswith("norms")}
    assert in_fp32(model) == norms
    stack_step(model, Call(0, context.rank, context.world_size, 1.0))
    call = Call(0, context.rank, context.world_size, 1.0)
    stack_step(plain, call)
    means = {name: buffer for name, buffer in model.named_buffers() if "running_mean" in name}
    assert means
    assert all(buffer.dtype is torch.float32 for buffer in means.values())
    assert_same(means, {name: dict(plain.named_buffers())[name] for name in means}, "statistics", NEAR)


@on_ranks(1, 2)
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, _instance_norm])
def test_norms_of_images_too(context: RankContext, norm: Any) -> None:
    """Whatever keeps statistics; in half precision altogether, if they are."""

    class Pictures(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), norm(3), nn.ReLU()) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    images = torch.randn(4, 3, 8, 8)
    for precision, count in ((Precision(), 6), (Precision(buffer_dtype=HALF), 0)):
        model = StreamShard(Pictures(), precision=precision)
        model(images).square().mean().backward()
        assert len(in_fp32(model)) == count
        assert all(param.grad is not None for param in model.parameters())


# -- what a class keeps ---------------------------------------------------------------------------------------------


@on_ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.float16, HALF])
def test_what_transformers_keeps_in_fp32_is_kept(context: RankContext, dtype: torch.dtype) -> None:
    """T5's output projections in fp16, not in bf16; its code casts."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
    model: Any = StreamShard(T5ForConditionalGeneration(config), precision=Precision(param_dtype=dtype))
    kept = {name for name, _ in model.named_parameters() if ".wo." in name}
    assert len(kept) == 4
    assert in_fp32(model) == (kept if dtype is torch.float16 else set())
    tokens = torch.randint(32, (2, 6))
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(param.grad is not None for param in model.parameters())

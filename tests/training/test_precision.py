"""Precision: half-precision weights with fp32 main weights, three reductions, dtypes of inputs and outputs."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from streamshard import ConfigError, Precision, ShardingError, StreamShard
from streamshard.comm.transport import sum_in_rank_order
from streamshard.nested import tensors_in
from tests import families
from tests.compare import EXACT, ROUNDING, Tolerance, assert_same, full_grads, full_weights
from tests.counts import engine_inside
from tests.faults import let_dynamo_look
from tests.models import DIM, Calling, Layer, NormStack, Stack, TinyConfig, TinyLM, stack_of, token_batch, vector_batch
from tests.races import detect_races
from tests.ranks import Call, RankContext, on_ranks
from tests.reference import adamw, built, lm_step, sharded_model, stack_step
from tests.scenarios import PRECISIONS
from tests.training.test_programs import Selective

BF16, FP16, SINGLE = torch.bfloat16, torch.float16, torch.float32
# One rounding to bf16 is 2^-8 of the element; sums of rounded terms, and rounded sums, differ by a few of them.
NEAR = Tolerance(relative=3e-2, absolute=1e-5)


class Mixed:
    """What StreamShard promises, in plain PyTorch: compute in half precision, keep and update fp32 main weights."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self.compute = model
        self.wire_dtype = precision.wire_dtype or precision.param_dtype
        self.main = {name: nn.Parameter(p.detach().float().clone()) for name, p in model.named_parameters()}
        self.compute.to(precision.param_dtype)
        self.optimizer = torch.optim.AdamW(self.main.values(), lr=1e-2, eps=1e-3, weight_decay=0.1)

    def step(self, number: int, world_size: int) -> list[Tensor]:
        losses = []
        with torch.no_grad():
            for name, p in self.compute.named_parameters():
                p.copy_(self.main[name].to(self.wire_dtype))
        for rank in range(world_size):
            self.compute.zero_grad()
            losses.append(lm_step(self.compute, Call(number, rank, world_size, 1.0)))
            for name, p in self.compute.named_parameters():
                if p.grad is not None:
                    grad = p.grad.float() / world_size
                    main = self.main[name]
                    main.grad = grad if main.grad is None else main.grad + grad
        return losses


def _pair(precision: Precision, **config: Any) -> tuple[Mixed, nn.Module]:
    plain, model = (built(lambda: TinyLM(TinyConfig(**config))) for _ in range(2))
    mixed = Mixed(plain, precision)
    plain.scale = plain.scale.float()  # buffers keep their dtype
    return mixed, StreamShard(model, precision=precision)


def train_beside(context: RankContext, mixed: Mixed, model: nn.Module, tolerance: Tolerance, *, steps: int = 3) -> None:
    """Train both; compare losses and gradients."""
    optimizer = adamw(model)
    for number in range(steps):
        wanted = mixed.step(number, context.world_size)
        found = lm_step(model, context.call(number))
        assert_same({"loss": found}, {"loss": wanted[context.rank]}, f"loss of step {number}", tolerance)
        grads = {name: grad for name, grad in full_grads(model).items() if name in mixed.main}
        assert_same(grads, {name: p.grad for name, p in mixed.main.items()}, "gradients", tolerance)
        for each in (mixed.optimizer, optimizer):
            each.step()
            each.zero_grad()


def assert_same_main_weights(model: nn.Module, mixed: Mixed, tolerance: Tolerance) -> None:
    """fp32, within tolerance."""
    weights = {name: weight for name, weight in full_weights(model).items() if name in mixed.main}
    assert {weight.dtype for weight in weights.values()} == {SINGLE}
    assert_same(weights, mixed.main, "main weights", tolerance)


@on_ranks()
@pytest.mark.parametrize(("world_size", "reduction"), [(1, "bf16"), (2, "16-bit wire"), (3, "16-bit")])
def test_bf16_trains_like_bf16_with_fp32_main_weights_in_plain_pytorch(context: RankContext, reduction: str) -> None:
    """Losses, gradients and main weights over five steps, against the same arithmetic written out."""
    mixed, model = _pair(PRECISIONS[reduction], tied=reduction == "16-bit wire")
    train_beside(context, mixed, model, NEAR, steps=5)
    assert_same_main_weights(model, mixed, Tolerance(2e-3, 1e-3))


@on_ranks(2)
def test_a_bf16_wire_rounds_the_weights_with_which_layers_compute_in_fp32(context: RankContext) -> None:
    """Half the bytes of an all-gather. Main weights keep fp32. The race detector knows the wire buffers."""
    mixed, model = _pair(Precision(param_dtype=SINGLE, wire_dtype=BF16))
    with detect_races(model):
        train_beside(context, mixed, model, ROUNDING)
    assert_same_main_weights(model, mixed, ROUNDING)
    units = engine_inside(model).units
    assert {flat.gathered.dtype for unit in units for flat in unit.flat_params} == {BF16}
    with pytest.raises(ConfigError, match="sums_in_rank_order=True, reduce_dtype=torch.bfloat16: .*leave reduce_dtype"):
        Precision(sums_in_rank_order=True, reduce_dtype=BF16)
    with pytest.raises(ConfigError, match="wire_dtype=torch.float32: wanted"):
        Precision(wire_dtype=torch.float32)


@on_ranks(1, 2)
def test_layers_compute_in_param_dtype(context: RankContext) -> None:
    """Inputs are cast, in containers too, unless `cast_inputs=False`; outputs to `output_dtype`. The rest is fp32."""
    seen: list[torch.dtype] = []

    class Looking(Stack):
        def forward(self, *, batch: dict[str, list[Tensor]]) -> Tensor:  # type: ignore[override]
            x, index = batch["x"]
            assert index.dtype == torch.int64
            seen.append(x.dtype)
            return super().forward(x.to(BF16))

    batch = {"x": [vector_batch(0, 0), torch.zeros(3, dtype=torch.int64)]}
    for casts, settings in ((True, {}), (False, {"cast_inputs": False, "output_dtype": None})):
        model: Any = StreamShard(Looking(), precision=Precision(param_dtype=BF16, **settings))
        model.layers[1].linear.register_forward_hook(
            lambda module, args, out: seen.extend([module.weight.dtype, args[0].dtype, out.dtype])
        )
        out = model(batch=batch)
        out.square().mean().backward()
        assert seen == [BF16 if casts else SINGLE, BF16, BF16, BF16]
        seen.clear()
        assert out.dtype == (SINGLE if casts else BF16)
        for name, p in model.named_parameters():
            assert p.dtype == p.grad.dtype == SINGLE, name


class _Collecting(Layer):
    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:  # type: ignore[override]
        losses.append(x.float().square().mean())
        return super().forward(x)


@on_ranks(1, 2)
def test_a_loss_that_a_layer_puts_into_the_copy_of_an_argument_raises(context: RankContext) -> None:
    """Nothing is copied where no tensor is cast, so the layer may write there."""
    for precision in ("bf16", Precision(cast_inputs=False, param_dtype=None), "fp32"):
        losses: list[Tensor] = []
        plain = Calling(_Collecting, lambda layer, x, losses=losses: layer(x, losses))
        model, x = StreamShard(plain, precision=precision), torch.ones(2, DIM)
        if precision != "bf16":
            (model(x).mean() + sum(losses)).backward()
            assert len(losses) == 4
            continue
        with pytest.raises(ShardingError, match=r"'layers.1' puts tensors into its argument, a list"):
            model(x)


@on_ranks(1, 2)
def test_a_loss_that_is_computed_from_outputs_has_the_digits_of_fp32(context: RankContext) -> None:
    """The whole model returns fp32. A part that is called by itself returns what it computes."""
    plain, target = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), torch.arange(4)
    x = vector_batch(0, context.rank, dim=8)
    wanted = nn.functional.cross_entropy(copy.deepcopy(plain).to(BF16)(x.to(BF16)).float(), target)
    for precision, dtype in (("bf16", BF16), (Precision(output_dtype=None), BF16), ("fp16", FP16), ("fp32", SINGLE)):
        model: Any = StreamShard(copy.deepcopy(plain), precision=precision)
        output = model(x)
        assert output.dtype is (dtype if isinstance(precision, Precision) else SINGLE)
        loss = nn.functional.cross_entropy(output, target)
        loss.backward()
        assert model[0](x).dtype is dtype
        if precision == "bf16":
            assert_same({"loss": loss.detach()}, {"loss": wanted.detach()}, "loss in fp32", Tolerance(1e-6, 0))


class _Returning(Stack):
    def forward(self, x: Tensor, returned: Callable[[Tensor], Any]) -> Any:  # type: ignore[override]
        return returned(super().forward(x))


class _Renamed(dict[str, Any]):
    """Warns of a field's old name, as transformers' outputs do."""

    def get(self, *_: Any) -> Any:
        raise AssertionError("past_key_values is deprecated")


@on_ranks(1)
def test_an_output_with_a_loss_keeps_its_logits_and_a_cache_stays_as_it_is(context: RankContext) -> None:
    """No memory for logits that no loss outside needs. float64 and integers stay."""
    model, x = StreamShard(_Returning()), torch.ones(2, DIM)

    def dtypes(returned: Callable[[Tensor], Any]) -> list[torch.dtype]:
        with torch.no_grad():
            return [tensor.dtype for tensor in tensors_in(model(x, returned))]

    for returned in (
        lambda t: {"logits": t, "aux_loss": t.mean(), "loss": None},
        lambda t: CausalLMOutputWithPast(logits=t, hidden_states=(t, t)),
        lambda t: (t, t.mean()),
        lambda t: [{"boxes": t}, {"boxes": t}],
    ):
        assert set(dtypes(returned)) == {SINGLE}
    assert dtypes(lambda t: CausalLMOutputWithPast(loss=t.mean(), logits=t)) == [SINGLE, BF16]
    assert dtypes(lambda t: {"loss": t.mean(1), "aux_loss": t.mean(), "logits": t}) == [SINGLE, SINGLE, BF16]
    assert dtypes(lambda t: CausalLMOutputWithPast(logits=t, past_key_values=((t + 1, t + 1),))) == [SINGLE, BF16, BF16]
    assert dtypes(lambda t: _Renamed(logits=t, cache=(t + 1,))) == [SINGLE, BF16]
    assert dtypes(lambda t: (t.double(), t.argmax(1))) == [torch.float64, torch.int64]


class _Loss(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


@on_ranks(2)
def test_a_loss_that_the_model_rounds_is_warned_about_once(context: RankContext) -> None:
    """On the first rank; a loss in fp32 is fine."""
    model = StreamShard(_Loss(), precision="bf16")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3):
            model(vector_batch(number, context.rank)).backward()
        StreamShard(_Loss(), precision="fp32")(vector_batch(0, context.rank)).backward()
    assert len(caught) == (context.rank == 0)
    assert all("computes its loss in torch.bfloat16" in str(each.message) for each in caught)


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_mean_of_16_bit_gradients_is_taken_in_fp32(accumulate: bool) -> None:
    """Also where 1/N is no power of two; more elements than are summed at a time."""
    ranks = 3
    chunks = [torch.randn(300_000).to(BF16) for _ in range(ranks)]
    start = torch.randn(300_000)
    out = start.clone()
    sum_in_rank_order(chunks, out, accumulate=accumulate, divisor=ranks)
    wanted = torch.stack(chunks).double().mean(0) + (start if accumulate else 0.0)
    assert_same({"mean": out}, {"mean": wanted.float()}, "mean", Tolerance(1e-6, 1e-6))


# -- modules in fp32: listed ones, a class's own, norms with statistics -----------------------------------------------

NEAR_IN_BF16 = Tolerance(5e-2, 5e-3)  # in most layers


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.linear = nn.Linear(DIM, DIM)
        self.gate = nn.Linear(DIM, DIM, bias=False)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        self.seen = [x.dtype, y.dtype, self.norm.weight.dtype, self.linear.weight.dtype, self.gate.weight.dtype]
        return x + torch.tanh(self.linear(y)) * torch.sigmoid(self.gate(y))


Gated = stack_of(Normed)


def in_fp32(model: nn.Module) -> set[str]:
    """Parameters that the layers see in fp32."""
    units = engine_inside(model).units
    pairs = [(param, param.unsharded) for unit in units for param in unit.params]
    return {param.name for param, view in pairs if view.dtype is torch.float32}


LISTED: list[tuple[Any, list[str]]] = [
    (["norm"], ["norm"]),
    (("gate", nn.LayerNorm), ["gate", "norm"]),
    (["layers.1.gate"], ["layers.1.gate"]),
    (["head"], ["head"]),
]


@on_ranks(2)
def test_listed_modules_compute_in_fp32(context: RankContext) -> None:
    """By whole words of names, of modules and parameters, and by class. They train."""
    for entries, parts in LISTED:
        model = StreamShard(Gated(), precision=Precision(fp32_modules=entries))
        assert in_fp32(model) == {name for name, _ in model.named_parameters() if any(part in name for part in parts)}
        stack_step(model, context.call(0))
    for entry, said in (("nor", "'nor'"), ("layers.9", "'layers.9'"), (nn.BatchNorm1d, "of class BatchNorm1d")):
        with pytest.raises(ConfigError, match=f"Stack has no module or parameter {said}"):
            StreamShard(Gated(), precision=Precision(fp32_modules=[entry]))
    for wrong in ("norm", [3], [""], nn.LayerNorm):
        with pytest.raises(ConfigError, match="fp32_modules=.*: wanted a list or tuple of names and of module classes"):
            Precision(fp32_modules=wrong)  # type: ignore[arg-type]


@on_ranks(1, 2)
def test_a_listed_module_takes_fp32_and_returns_the_dtype_of_its_input(context: RankContext) -> None:
    """Inside a layer nothing else notices. Gradients are near those of fp32."""
    precision = Precision(fp32_modules=[nn.LayerNorm, "gate"])
    plain: Any = built(Gated)
    model = sharded_model(Gated, precision=precision)
    single = sharded_model(Gated)
    inputs = vector_batch(0, context.rank)
    found = model(inputs)
    with torch.no_grad():
        x = inputs.to(BF16)
        plain.to(BF16)
        for layer in plain.layers:
            y = layer.norm.float()(x.float()).to(BF16)
            x = x + torch.tanh(layer.linear(y)) * torch.sigmoid(layer.gate.float()(y.float()).to(BF16))
        wanted = plain.head(x)
    assert_same({"outputs": found}, {"outputs": wanted}, "forward", Tolerance(1e-2, 1e-2))
    assert all(layer.seen == [BF16, BF16, torch.float32, BF16, torch.float32] for layer in model.layers)
    found.square().mean().backward()
    single(inputs).square().mean().backward()
    assert_same(full_grads(model), full_grads(single), "gradients", NEAR_IN_BF16)


@on_ranks(1, 2)
def test_batch_norm_trains_in_a_half_precision_model(context: RankContext) -> None:
    """Its weights and statistics are fp32 without being listed."""
    plain: Any = built(NormStack)
    model = sharded_model(NormStack, precision="bf16")
    assert in_fp32(model) == {name for name, _ in model.named_parameters() if name.startswith("norms")}
    call = context.call(0)
    stack_step(model, call)
    stack_step(plain, call)
    means = {name: buffer for name, buffer in model.named_buffers() if "running_mean" in name}
    assert {buffer.dtype for buffer in means.values()} == {torch.float32}
    assert_same(means, {name: dict(plain.named_buffers())[name] for name in means}, "statistics", NEAR_IN_BF16)


@on_ranks(2)
def test_modules_that_a_transformers_class_keeps_in_fp32_are_kept(context: RankContext) -> None:
    """T5's output projections in fp16, not in bf16; its code casts."""
    for dtype in (torch.float16, BF16):
        model: Any = StreamShard(families.t5(), precision=Precision(param_dtype=dtype))
        kept = {name for name, _ in model.named_parameters() if ".wo." in name}
        assert len(kept) == 4
        assert in_fp32(model) == (kept if dtype is torch.float16 else set())
        tokens = token_batch(0, context.rank)
        model(input_ids=tokens, decoder_input_ids=tokens).logits.float().square().mean().backward()
        assert all(param.grad is not None for param in model.parameters())


# -- fp8 by torchao: all-gathers and reductions change nothing --------------------------------------------------------


def _float8() -> Any:
    return pytest.importorskip("torchao.float8", reason="needs torchao: pip install streamshard[test]")


def _config(recipe: str, **options: Any) -> Any:
    """The recipe, emulated: fp8 numbers, multiplied in fp32."""
    config = _float8().Float8LinearConfig.from_recipe_name(recipe)
    return dataclasses.replace(config, emulate=True, **options)


def _in_fp8(kind: type[TinyLM], recipe: str, **options: Any) -> Any:
    model = built(lambda: kind(TinyConfig(depth=2)))
    _float8().convert_to_float8_training(
        model, config=_config(recipe, **options), module_filter_fn=lambda module, name: name != "head"
    )
    assert sum(type(module).__name__ == "Float8Linear" for module in model.modules()) == 8
    return model


@on_ranks(2)
@pytest.mark.parametrize(
    ("recipe", "kind", "is_compiled"), [("tensorwise", Selective, False), ("rowwise", TinyLM, True)]
)
def test_fp8_layers_train_as_in_one_process(
    context: RankContext, recipe: str, kind: type[TinyLM], is_compiled: bool
) -> None:
    """bf16 weights are gathered, torchao scales full ones: losses, gradients and fp32 main weights are equal."""
    mixed = Mixed(_in_fp8(kind, recipe), Precision())
    model = StreamShard(_in_fp8(kind, recipe))
    if is_compiled:
        let_dynamo_look()
        for each in (model, mixed.compute):
            each.blocks[0].compile(backend="aot_eager")
    train_beside(context, mixed, model, EXACT)
    assert_same_main_weights(model, mixed, EXACT)


@on_ranks(2)
def test_fp8_of_fsdp2_or_after_sharding_is_refused_by_name(context: RankContext) -> None:
    """Weights that FSDP2 asks to cast before an all-gather; modules that no unit knows."""
    with pytest.raises(ShardingError, match="'blocks.0.attention.qkv.weight' is a .*enable_fsdp_float8_all_gather"):
        StreamShard(_in_fp8(TinyLM, "tensorwise", enable_fsdp_float8_all_gather=True))
    model = StreamShard(built(TinyLM))
    _float8().convert_to_float8_training(model, config=_config("tensorwise"))
    with pytest.raises(ShardingError, match="weight' "):
        lm_step(model, context.call(0))

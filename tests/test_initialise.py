"""Weights that a model initialises itself, unit by unit: its own distributions, equal on any number of ranks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamshard import ShardingError, StreamShard, init_weights, load_safetensors
from tests.compare import EXACT, assert_same, full_weights
from tests.counts import engine_inside
from tests.families import gpt2, llama, mixtral, t5
from tests.models import DIM, Layer, NormStack, Stack, TinyConfig, TinyLM, token_batch, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, lm_step
from tests.test_meta_device import on_meta

MODELS: list[Callable[[], Any]] = [NormStack, llama, gpt2, t5, mixtral]


def _reset(model: nn.Module) -> None:
    if callable(reset := getattr(model, "reset_parameters", None)):
        reset()


def _tiny_lm(module: nn.Module) -> None:
    """What the modules of a `TinyLM` need a function for; deeper layers as GPT-2 has them."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None if isinstance(module, nn.Linear) else False:
            module.bias.data.zero_()
    elif isinstance(module, TinyLM):
        module.positions.data = torch.randn_like(module.positions)
        module.scale = torch.tensor(1.5)
        for block in module.blocks:
            block.down.weight.data.mul_(0.5)
        module.embedding.weight[3].zero_()
    elif isinstance(module, nn.LayerNorm):
        nn.init.ones_(module.weight)
        module.bias.data[:] = torch.rand(DIM, dtype=module.bias.dtype)


def plain(make: Callable[[], Any]) -> Any:
    if make in (Stack, NormStack):
        return make().apply(_reset)
    with importlib.import_module("transformers.initialization").no_tie_weights():
        model = make()
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    for name in model.all_tied_weights_keys:  # they get another's value, so transformers does not initialise them
        model.get_parameter(name)._is_hf_initialized = True
    model.initialize_weights()
    model.tie_weights()
    return model


def assert_alike(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Constants and tables are equal, random numbers are of the same distribution, as far as its extent shows."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        value, other = value.detach(), found[name].to(value.dtype)
        if value.unique().numel() == 1 and value.numel() > 1 or not value.is_floating_point():
            assert torch.equal(other, value), name
        elif value.numel() > 200 and not torch.equal(other, value):
            assert 0.7 < float(other.std() / value.std()) < 1.4, name
            assert abs(float(other.mean() - value.mean())) < 0.3 * float(value.std()), name


def sharded_weights(context: RankContext, make: Callable[[], Any], **settings: Any) -> dict[str, Tensor]:
    model: Any = StreamShard(on_meta(make), precision=FP32, **settings)
    init_weights(model, seed=5)
    assert not engine_inside(model).empty
    return {**model.full_state_dict(rank0_only=False), **dict(model.named_buffers())}


@pytest.mark.parametrize("make", MODELS)
def test_numbers_are_the_models_own_distribution_and_equal_on_any_number_of_ranks(ranks: Any, make: Any) -> None:
    """Of torch's modules, and of transformers' classes, whatever touches whose weights; tables as well."""
    first = ranks(1).run(sharded_weights, make)[0]
    for found in ranks(3).run(sharded_weights, make):
        assert_same(found, first, "weights on 3 ranks", EXACT)
    torch.manual_seed(7)
    model = plain(make)
    assert_alike(first, {**model.state_dict(), **dict(model.named_buffers())})


@on_ranks(2)
@pytest.mark.parametrize("settings", [{}, {"weight_slots": "all", "min_unit_size": "1MiB"}])
def test_an_init_function_may_write_to_weights_of_any_module(context: RankContext, settings: dict[str, Any]) -> None:
    """As with ``apply``: in place, through views and ``.data``, also to weights of modules inside, or beside."""
    for config in (TinyConfig(), TinyConfig(tied=True)):
        torch.manual_seed(3)
        other = torch.randn(3)
        model: Any = StreamShard(on_meta(lambda config=config: TinyLM(config)), precision=FP32, **settings)
        torch.manual_seed(3)

        def init(module: nn.Module, model: Any = model) -> None:
            _tiny_lm(module)
            if module is model.head:
                model.blocks[0].up.weight.fill_(0.125)
            elif module is model.blocks[0].down:  # reads what it has written
                module.bias.copy_(module.weight.norm(dim=1))

        init_weights(model, init, seed=9)
        assert torch.equal(torch.randn(3), other)  # the generator is where it was
        reference = TinyLM(config)
        with torch.no_grad():
            reference.apply(_tiny_lm)
        found = full_weights(model)
        assert bool((found["blocks.0.up.weight"] == 0.125).all())
        torch.testing.assert_close(found["blocks.0.down.bias"], 2 * found["blocks.0.down.weight"].norm(dim=1))
        with torch.no_grad():
            reference.blocks[0].up.weight.fill_(0.125)
            reference.blocks[0].down.bias.copy_(found["blocks.0.down.bias"])
        assert_alike(found, reference.state_dict())
        assert not found["embedding.weight"][3].any()
        assert 0.008 < found["blocks.1.down.weight"].std() < 0.012
        reference.load_state_dict(found, strict=False)
        tokens = token_batch(0, context.rank)
        torch.testing.assert_close(model(tokens), reference(tokens))
        lm_step(model, context.call(0))


class Block(Layer):
    def init_weights(self, std: float) -> None:
        nn.init.trunc_normal_(self.linear.weight, std=std)
        nn.init.zeros_(self.linear.bias)


class Titan(Stack):
    """As torchtitan's models: ``model.init_weights()`` goes into the layers and their parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.register_buffer("table", torch.arange(DIM).float(), persistent=False)

    def init_weights(self, device: torch.device | None = None) -> None:
        with torch.device(device or self.table.device):
            self.table = torch.arange(DIM).float()
        nn.init.normal_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        for number, layer in enumerate(self.layers, 1):
            layer.init_weights(0.1 / number)


@on_ranks(3)
def test_a_models_own_init_weights_is_called_and_no_other(context: RankContext) -> None:
    """``reset_parameters`` of its submodules is not called. The error names parameters that it leaves out."""
    model: Any = StreamShard(on_meta(Titan), precision=FP32)
    init_weights(model, seed=5)
    found = full_weights(model)
    for number in range(4):
        assert 0.08 / (number + 1) < found[f"layers.{number}.linear.weight"].std() < 0.12 / (number + 1)
        assert not found[f"layers.{number}.linear.bias"].any()
    assert torch.equal(model.table, torch.arange(DIM).float())
    incomplete = on_meta(Titan)
    incomplete.norm = on_meta(lambda: nn.LayerNorm(DIM))
    incomplete = StreamShard(incomplete, precision=FP32)
    with pytest.raises(ShardingError, match=r"leaves parameter 'norm.weight', 'norm.bias' without a value"):
        init_weights(incomplete)


@on_ranks(2)
def test_an_init_weights_that_takes_arguments_is_refused(context: RankContext) -> None:
    """nanoGPT's constructor applies it to each module, and then changes some weights again."""

    class NanoGPT(TinyLM):
        def _init_weights(self, module: nn.Module) -> None:
            _tiny_lm(module)

    model: Any = StreamShard(on_meta(NanoGPT), precision=FP32)
    with pytest.raises(ShardingError, match=r"'the model' \(NanoGPT\) has a method _init_weights.*be model._init_w"):
        init_weights(model)
    init_weights(model, model._init_weights)
    assert not full_weights(model)["embedding.weight"][3].any()
    layers: Any = StreamShard(on_meta(lambda: nn.Sequential(Block(), Block())), precision=FP32)
    with pytest.raises(ShardingError, match=r"'0' \(Block\) has a method init_weights"):
        init_weights(layers)


@on_ranks(2)
def test_init_weights_keeps_tensors_that_have_values(context: RankContext) -> None:
    torch.manual_seed(0)
    state = {name: value + 1 for name, value in NormStack().state_dict().items()}
    model: Any = StreamShard(on_meta(NormStack), precision=FP32)
    some = {name: value for name, value in state.items() if not name.endswith("bias") and "norms.0" not in name}
    model.load_state_dict(some, strict=False)
    init_weights(model, seed=5)
    found = full_weights(model)
    for name, value in some.items():
        assert torch.equal(found[name], value), name
    for name in found.keys() - some.keys():
        assert not found[name].isnan().any(), name
    init_weights(model, lambda module: nn.init.zeros_(module.weight), seed=6)
    assert_same(full_weights(model), found, "weights after a second call", EXACT)


@on_ranks(2)
@pytest.mark.parametrize("make", [llama, t5, mixtral])
def test_tables_that_no_file_has_are_computed(context: RankContext, make: Callable[[], Any], tmp_path: Path) -> None:
    """What a model that was loaded without being sharded computes; it trains on the same."""
    torch.manual_seed(0)
    reference = make()
    if context.rank == 0:
        reference.save_pretrained(tmp_path)
    model: Any = StreamShard(on_meta(make), precision=FP32)
    assert load_safetensors(model, tmp_path).missing == []
    assert not engine_inside(model).empty
    assert_same(dict(model.named_buffers()), dict(reference.named_buffers()), "buffers", EXACT)
    assert_same(full_weights(model), reference.state_dict(), "weights", EXACT)
    tokens = torch.randint(1, 60, (2, 5), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens}
    loss = model(**batch).loss
    other = reference.train(model.training)(**batch).loss
    torch.testing.assert_close(loss, other)
    loss.backward()


# What is done to a `Stack`, and what is said of it.
IMPOSSIBLE: dict[str, tuple[Callable[[Any], object], str]] = {
    "a part": (lambda m: m.layers[0].linear.weight[:3].fill_(torch.nan),
               "leaves parameter 'layers.0.linear.weight' without a value.*: load it, or write reset_parameters"),
    "another parameter": (lambda m: setattr(m.head, "weight", nn.Parameter(torch.ones(3))),
                          "parameter 'head.weight' was replaced"),
    "another shape": (lambda m: setattr(m.head.weight, "data", torch.ones(3, device=m.head.weight.device)),
                      "leaves parameter 'head.weight' without a value of its shape"),
    "another unit's weight": (lambda m: m.head.weight.copy_(m.layers[0].linear.weight[:1]),
                              "initialisation reads a weight that has no values now"),
    "its own error": (lambda m: 1 / 0, "division by zero"),
}  # fmt: skip


@on_ranks(2)
@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_an_unsupported_initialisation_raises_and_fills_nothing(context: RankContext, what: str) -> None:
    init, message = IMPOSSIBLE[what]
    model: Any = StreamShard(on_meta(Stack), precision=FP32)
    head = model.head.weight
    with pytest.raises((ShardingError, ZeroDivisionError), match=message):
        init_weights(model, lambda module: (_reset(module), init(module) if module is model else None))
    assert len(engine_inside(model).empty) == 10
    model.head._parameters["weight"] = head
    init_weights(model, seed=5)
    model(vector_batch(0, 0))


@on_ranks(2)
def test_all_ranks_get_rank_0s_random_numbers(context: RankContext) -> None:
    model: Any = StreamShard(on_meta(Stack), precision=FP32)

    def draw(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            nn.init.normal_(param, generator=torch.Generator().manual_seed(context.rank))
            model.layers[0].linear.weight.data.clamp_(-1, 1)  # outside of its module's parameters

    init_weights(model, draw, seed=context.rank)
    weights = full_weights(model)
    assert bool((weights["layers.0.linear.weight"].abs() <= 1).all())
    first = nn.init.normal_(torch.empty(16, 16), generator=torch.Generator().manual_seed(0))
    assert torch.equal(weights["layers.1.linear.weight"], first)


@on_ranks(1)
def test_adapters_on_meta_are_refused(context: RankContext) -> None:
    """Transformers would initialise them as linear layers: an update that is not zero at the start."""
    peft: Any = pytest.importorskip("peft", reason="PEFT is not installed")
    config = peft.LoraConfig(target_modules=["q_proj"])
    model: Any = StreamShard(peft.get_peft_model(on_meta(llama), config), precision=FP32)
    with pytest.raises(ShardingError, match=r"q_proj.lora_A' is an adapter that was made on"):
        init_weights(model)

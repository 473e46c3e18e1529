"""Weights that a model initialises itself, sharded: the numbers of the unsharded model, on any number of ranks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from streamshard import StreamShard, init_weights, load_safetensors
from streamshard.checkpoint import huggingface
from streamshard.engine.handle import engine_of
from streamshard.errors import ConfigError, RankMismatchError, ShardingError
from tests.engine.test_empty import on_meta
from tests.families import bert, dinov2, gpt2, llama, mixtral, qwen3_vl_moe, t5
from tests.models import DIM, NormStack, Stack, TinyConfig, TinyLM, token_batch, vector_batch
from tests.ranks import RankContext, RankPool, on_ranks
from tests.reference import EXACT, FP32, Call, assert_same, full_weights, lm_step

MODELS: list[Callable[[], Any]] = [Stack, NormStack, llama, gpt2, bert, t5, mixtral, dinov2, qwen3_vl_moe]


def _reset(model: nn.Module) -> None:
    """As torch's modules initialise themselves when they are made."""
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
        module.weight = nn.Parameter(torch.ones(DIM))
        module.bias.data[:] = torch.rand(DIM, dtype=module.bias.dtype)


def plain(make: Callable[[], Any], seed: int) -> Any:
    """The unsharded model, initialised by itself after ``torch.manual_seed(seed)``."""
    if make in (Stack, NormStack):
        model = make()
        torch.manual_seed(seed)
        return model.apply(_reset)
    with importlib.import_module("transformers.initialization").no_tie_weights():
        model = make()
    for module in model.modules():
        module.__dict__.pop(huggingface.INITIALISED, None)
    for name in model.all_tied_weights_keys:  # they get another's value, so transformers does not initialise them
        setattr(model.get_parameter(name), huggingface.INITIALISED, True)
    torch.manual_seed(seed)
    model.initialize_weights()
    model.tie_weights()
    return model


def sharded_weights(context: RankContext, make: Callable[[], Any], **settings: Any) -> dict[str, Tensor]:
    """What `init_weights` makes of a model from meta; buffers too."""
    model: Any = StreamShard(on_meta(make), precision=FP32, **settings)
    init_weights(model, seed=5)
    assert engine_of(model).empty is None
    return {**model.full_state_dict(rank0_only=False), **dict(model.named_buffers())}


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_numbers_are_the_unsharded_models_on_any_number_of_ranks(ranks: RankPool, make: Callable[[], Any]) -> None:
    """To the bit: of torch's modules, and of transformers' classes, whatever touches whose weights; tables as well."""
    model = plain(make, seed=5)
    wanted = {**model.state_dict(), **dict(model.named_buffers())}
    for world_size in (1, 3):
        for found in ranks(world_size).run(sharded_weights, make):
            assert_same(found, wanted, f"weights on {world_size} ranks", EXACT)


@on_ranks(1, 2)
@pytest.mark.parametrize("settings", [{}, {"weight_slots": "all", "min_unit_size": "1MiB"}, {"units": [nn.LayerNorm]}])
def test_a_function_sees_whole_weights_in_every_module(context: RankContext, settings: dict[str, Any]) -> None:
    """As with ``apply``: it may assign, write through views and ``.data``, and go into other modules' weights."""
    for config in (TinyConfig(), TinyConfig(tied=True)):
        torch.manual_seed(3)
        other = torch.randn(3)
        model: Any = StreamShard(on_meta(lambda config=config: TinyLM(config)), precision=FP32, **settings)
        torch.manual_seed(3)
        init_weights(model, _tiny_lm, seed=9)
        assert torch.equal(torch.randn(3), other)  # the generator is where it was
        reference = TinyLM(config)
        torch.manual_seed(9)
        with torch.no_grad():
            reference.apply(_tiny_lm)
        assert_same(full_weights(model), reference.state_dict(), "weights", EXACT)
        tokens = token_batch(0, context.rank)
        torch.testing.assert_close(model(tokens), reference(tokens))
        lm_step(model, Call(0, context.rank, context.world_size, 1.0))


@on_ranks(2)
def test_without_a_seed_it_is_rank_0s(context: RankContext) -> None:
    """Which ranks may have set to different ones."""
    torch.manual_seed(40 + context.rank)
    model: Any = StreamShard(on_meta(Stack), precision=FP32)
    init_weights(model)
    model.check_weights()
    assert_same(full_weights(model), plain(Stack, 40).state_dict(), "weights", EXACT)


@on_ranks(1, 2)
def test_weights_are_of_the_dtype_that_they_had(context: RankContext) -> None:
    """Random numbers of 16 bits are others."""
    model: Any = StreamShard(on_meta(lambda: Stack().to(torch.bfloat16)), precision=FP32)
    init_weights(model, seed=5)
    reference = Stack().to(torch.bfloat16)
    torch.manual_seed(5)
    wanted = {name: value.float() for name, value in reference.apply(_reset).state_dict().items()}
    assert_same(full_weights(model), wanted, "weights", EXACT)


# ---------------------------------------------------------------------------------------------- what has values


@on_ranks(1, 2)
def test_what_has_values_keeps_them(context: RankContext) -> None:
    """Loaded weights, statistics of batch norm, layers that were never on meta; a second call changes nothing."""
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


@on_ranks(1, 2)
def test_an_initialisation_may_read_what_was_loaded(context: RankContext) -> None:
    """And what it has initialised before: then weights are gathered."""

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(DIM, DIM)
            self.magnitude = nn.Parameter(torch.ones(DIM))

        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.weight.copy_(torch.randn(DIM, DIM))
                self.bias.zero_()
            if hasattr(self, "magnitude"):
                self.magnitude.data = self.weight.norm(dim=1)

    class Scaleds(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*(Scaled() for _ in range(4)))

        def reset_parameters(self) -> None:
            with torch.no_grad():
                self[3].weight.copy_(sum(self[number].weight for number in range(3)))

    torch.manual_seed(0)
    state = {name: torch.randn_like(value) for name, value in Scaleds().state_dict().items() if "magn" not in name}
    model: Any = StreamShard(on_meta(Scaleds), precision=FP32)
    model.load_state_dict(state, strict=False)
    init_weights(model, seed=5)
    found = full_weights(model)
    for number in range(4):
        torch.testing.assert_close(found[f"{number}.magnitude"], state[f"{number}.weight"].norm(dim=1))
        assert torch.equal(found[f"{number}.weight"], state[f"{number}.weight"])
    model = StreamShard(on_meta(Scaleds), precision=FP32)
    init_weights(model, seed=5)
    found = full_weights(model)
    torch.testing.assert_close(found["3.weight"], sum(found[f"{number}.weight"] for number in range(3)))


@on_ranks(1, 2)
@pytest.mark.parametrize("make", [llama, gpt2, bert, t5, mixtral])
def test_tables_that_no_file_has_are_computed(context: RankContext, make: Callable[[], Any], tmp_path: Path) -> None:
    """What a model that was loaded without being sharded computes; it trains on the same."""
    torch.manual_seed(0)
    reference = make()
    if context.rank == 0:
        reference.save_pretrained(tmp_path)
    model: Any = StreamShard(on_meta(make), precision=FP32)
    assert load_safetensors(model, tmp_path).missing == []
    assert engine_of(model).empty is None or not engine_of(model).empty.buffers()
    assert_same(dict(model.named_buffers()), dict(reference.named_buffers()), "buffers", EXACT)
    assert_same(full_weights(model), reference.state_dict(), "weights", EXACT)
    tokens = torch.randint(1, 60, (2, 5), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens}
    loss = model(**batch).loss
    other = reference.train(model.training)(**batch).loss
    torch.testing.assert_close(loss, other)
    loss.backward()


@on_ranks(1, 2)
@pytest.mark.parametrize("make", [llama, bert, t5])
def test_init_empty_weights_is_as_good_as_the_meta_device(
    context: RankContext, make: Callable[[], Any], tmp_path: Path
) -> None:
    """It unties weights, has modules say that they are initialised, and keeps buffers."""
    from accelerate import init_empty_weights

    torch.manual_seed(0)
    reference = make()
    if context.rank == 0:
        reference.save_pretrained(tmp_path)
    with init_empty_weights():
        model = make()
    model = StreamShard(model, precision=FP32)
    load_safetensors(model, tmp_path)
    assert_same(full_weights(model), reference.state_dict(), "weights", EXACT)
    with init_empty_weights():
        model = make()
    model = StreamShard(model, precision=FP32)
    init_weights(model, seed=5)
    assert_same(full_weights(model), plain(make, 5).state_dict(), "weights", EXACT)
    assert_same(dict(model.named_buffers()), dict(reference.named_buffers()), "buffers", EXACT)


class Rotated(nn.Module):
    """Layers, and a table that is not saved; computed when the module is made, and by a method if `resets`."""

    def __init__(self, *, resets: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.register_buffer("table", torch.arange(DIM).float(), persistent=False)
        self.register_buffer("kept", torch.ones(2))
        if resets:
            self.reset_parameters = self.reset

    def reset(self) -> None:
        """The table; and what has been loaded."""
        self.table = torch.arange(DIM).float()
        self.kept.zero_()
        for param in self.parameters():
            nn.init.zeros_(param)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> the same"""
        for layer in self.layers:
            x = layer(x) * self.table
        return x


@on_ranks(1, 2)
@pytest.mark.parametrize("resets", [True, False])
def test_tables_of_other_models_are_computed_by_their_reset_parameters(
    context: RankContext, resets: bool, tmp_path: Path
) -> None:
    """Which leaves what was loaded alone. Without one, a function computes them."""
    torch.manual_seed(0)
    reference = Rotated(resets=resets)
    if context.rank == 0:
        save_file(reference.state_dict(), tmp_path / "model.safetensors")
    model: Any = StreamShard(on_meta(lambda: Rotated(resets=resets)), precision=FP32)
    load_safetensors(model, tmp_path)
    if not resets:
        with pytest.raises(ShardingError, match="buffer 'table' is empty"):
            model(vector_batch(0, 0))
        init_weights(model, lambda module: model.reset() if module is model else None)
    assert_same(full_weights(model), reference.state_dict(), "weights", EXACT)
    x = vector_batch(0, context.rank)
    torch.testing.assert_close(model(x), reference(x))


@on_ranks(1, 2)
def test_what_a_base_model_lacks_is_initialised_after_it_is_loaded(context: RankContext, tmp_path: Path) -> None:
    """A head on a base model's file: what ``from_pretrained`` does by itself."""
    torch.manual_seed(0)
    base = llama().model
    if context.rank == 0:
        base.save_pretrained(tmp_path)
    model: Any = StreamShard(on_meta(llama), precision=FP32)
    assert load_safetensors(model, tmp_path, strict=False).missing == ["lm_head.weight"]
    with pytest.raises(ShardingError, match="'lm_head.weight' is empty"):
        model(token_batch(0, 0))
    init_weights(model, seed=5)
    found = full_weights(model)
    assert 0.01 < found.pop("lm_head.weight").std() < 0.03
    assert_same(
        {name.removeprefix("model."): value for name, value in found.items()}, base.state_dict(), "weights", EXACT
    )


@on_ranks(1, 2)
def test_a_model_of_transformers_may_be_part_of_another(context: RankContext) -> None:
    """It initialises itself, what is around it does as well."""

    class Scorer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = llama().model
            self.score = nn.Linear(16, 1)

    model: Any = StreamShard(on_meta(Scorer), precision=FP32)
    init_weights(model, seed=5)
    found = full_weights(model)
    assert bool((found["backbone.norm.weight"] == 1).all())
    assert bool((found["backbone.layers.0.self_attn.q_proj.weight"].abs() < 0.2).all())
    assert float(found["score.weight"].abs().max()) > 0.1
    assert not model.backbone.rotary_emb.inv_freq.isnan().any()


# ---------------------------------------------------------------------------------------------- what is refused


@on_ranks(1, 2)
def test_modules_that_nothing_initialises_are_named_before_anything_is(context: RankContext) -> None:
    """With the function that would help."""
    model: Any = StreamShard(on_meta(TinyLM), precision=FP32)
    with pytest.raises(
        ShardingError, match=r"how to initialise 'the model' \(TinyLM\): wanted a .*init_weights\(model"
    ):
        init_weights(model)
    assert len(engine_of(model).empty.params()) == 53
    with pytest.raises(ShardingError, match=r"the initialisation has left 'positions', 'scale' empty"):
        init_weights(model, _reset)
    init_weights(model, _tiny_lm)
    model(token_batch(0, 0))


# What is done to a `Stack`, one of whose parameters is in its list `kept` as well; and what is said of it.
IMPOSSIBLE: dict[str, tuple[Callable[[Any], object], str]] = {
    "a list": (
        lambda model: model.kept[0].data.fill_(1.0) + model.kept[0].detach().fill_(1.0),
        "written to parameter 'layers.0.linear.weight' by way of a list",
    ),
    "a part": (
        lambda model: model.layers[0].linear.weight[:3].fill_(1.0),
        "left elements of parameter 'layers.0.linear.weight' without a value",
    ),
    "another shape": (
        lambda model: setattr(model.head, "weight", nn.Parameter(torch.ones(3))),
        r"a tensor of shape \(3,\) in the place of parameter 'head.weight', which was \(1, 16\)",
    ),
    "no parameter": (lambda model: setattr(model.head, "bias", None), "registers 'bias', which was a parameter"),
    "a new one": (
        lambda model: model.head.register_parameter("scale", nn.Parameter(torch.ones(3))),
        "registers 'scale', which was no parameter",
    ),
    "its own error": (lambda model: 1 / 0, "division by zero"),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_what_an_initialisation_cannot_do_is_named(context: RankContext, what: str) -> None:
    """What it should have written to is empty still, and can be initialised."""
    init, message = IMPOSSIBLE[what]
    model: Any = StreamShard(on_meta(Stack), precision=FP32)
    model.kept = [model.layers[0].linear.weight]
    with pytest.raises((ShardingError, ZeroDivisionError), match=message):
        init_weights(model, lambda module: init(module) if module is model else None)
    init_weights(model, seed=5)
    assert_same(full_weights(model), plain(Stack, 5).state_dict(), "weights", EXACT)


@on_ranks(2)
def test_ranks_that_differ_are_heard_of_on_all(context: RankContext) -> None:
    """In their seeds, their numbers, or in that one raises."""
    model: Any = StreamShard(on_meta(Stack), precision=FP32)
    with pytest.raises(RankMismatchError, match="seed="):
        init_weights(model, seed=context.rank)
    with pytest.raises(ConfigError, match="seed='a'"):
        init_weights(model, seed="a")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="init=3"):
        init_weights(model, 3)  # type: ignore[arg-type]

    def fail(module: nn.Module) -> None:
        if context.rank == 1:
            raise KeyError("mine")

    with pytest.raises(ShardingError, match="could not initialise the model: rank 1: KeyError: 'mine'"):
        init_weights(model, fail)

    def draw(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            nn.init.normal_(param, generator=torch.Generator().manual_seed(context.rank))

    with pytest.raises(RankMismatchError, match="initialised the model with different numbers"):
        init_weights(model, draw)
    with pytest.raises(ShardingError, match=r"'layers.0.linear.weight', and 9 more, is empty"):
        model(vector_batch(0, 0))
    init_weights(model, seed=5)
    assert_same(full_weights(model), plain(Stack, 5).state_dict(), "weights", EXACT)


@on_ranks(2)
def test_what_failed_on_one_rank_is_undone_on_all(context: RankContext) -> None:
    """Weights and buffers are empty again, also where everything went well."""
    model: Any = StreamShard(on_meta(NormStack), precision=FP32)
    buffers = dict(model.named_buffers())

    def fail(module: nn.Module) -> None:
        _reset(module)
        if isinstance(module, nn.BatchNorm1d):
            module.running_var = torch.ones(DIM)
        if module is model and context.rank == 1:
            raise KeyError("mine")

    with pytest.raises((ShardingError, KeyError), match="mine"):
        init_weights(model, fail)
    assert all(buffers[name] is buffer for name, buffer in model.named_buffers())
    with pytest.raises(ShardingError, match=r"'layers.0.linear.weight', and 22 more, is empty"):
        model(vector_batch(0, 0))
    init_weights(model, seed=5)
    assert_same(full_weights(model), plain(NormStack, 5).state_dict(), "weights", EXACT)


@on_ranks(2)
def test_all_of_it_may_be_inside_the_meta_device(context: RankContext, tmp_path: Path) -> None:
    """Whose context one forgets to leave: nothing of ours is on it."""
    if context.rank == 0:
        save_file(NormStack().state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model: Any = StreamShard(NormStack(), precision=FP32)
        init_weights(model, seed=5)
        other: Any = StreamShard(NormStack(), precision=FP32)
        load_safetensors(other, tmp_path)
    assert_same(full_weights(model), plain(NormStack, 5).state_dict(), "weights", EXACT)
    saved = load_file(tmp_path / "model.safetensors")
    found = full_weights(other)
    assert_same(found, {name: saved[name] for name in found}, "loaded weights", EXACT)


@on_ranks(4)
def test_replicas_have_the_same_numbers(context: RankContext) -> None:
    """On a 2-D mesh."""
    model: Any = StreamShard(on_meta(Stack), mesh=init_device_mesh("cpu", (2, 2)), precision=FP32)
    with torch.inference_mode():
        init_weights(model, seed=5)
    model.check_weights()
    assert_same(full_weights(model), plain(Stack, 5).state_dict(), "weights", EXACT)


@on_ranks(1)
def test_adapters_on_meta_are_refused(context: RankContext) -> None:
    """Transformers would initialise them as linear layers: an update that is not zero at the start."""

    class Adapted(nn.Module):
        __module__ = "peft.tuners.lora.layer"

        def __init__(self, base_layer: nn.Module) -> None:
            super().__init__()
            self.base_layer = base_layer
            self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 16)})

    model = on_meta(llama)
    model.model.layers[0].self_attn.q_proj = Adapted(model.model.layers[0].self_attn.q_proj)
    nn.init.zeros_(model.model.layers[0].self_attn.q_proj.lora_B["default"].weight)
    model = StreamShard(model, precision=FP32)
    init_weights(model)
    assert not model.get_parameter("model.layers.0.self_attn.q_proj.lora_B.default.weight").any()
    model = on_meta(llama)
    with torch.device("meta"):
        model.model.layers[0].self_attn.q_proj = Adapted(model.model.layers[0].self_attn.q_proj)
    model = StreamShard(model, precision=FP32)
    with pytest.raises(ShardingError, match=r"q_proj.lora_B.default.(weight|bias)' is of an adapter that was made on"):
        init_weights(model)


@on_ranks(1, 2)
def test_inside_a_forward_or_whole_parameters_it_is_refused(context: RankContext) -> None:
    """As whatever works with pieces."""
    model: Any = StreamShard(on_meta(Stack), precision=FP32)
    with model.summon_full_params(), pytest.raises(ShardingError, match="init_weights inside summon_full_params"):
        init_weights(model)
    with pytest.raises(ShardingError, match="not sharded"):
        init_weights(Stack())
    init_weights(model)
    model(vector_batch(0, 0)).sum().backward()

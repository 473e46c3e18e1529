"""Frozen weights cost little: they keep the dtype or packed form that they came in, and nothing reduces them."""

from __future__ import annotations

import contextlib
import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from streamshard import StreamShard, export_safetensors, load_checkpoint, save_checkpoint
from streamshard.comm.streams import Collective
from streamshard.errors import CheckpointError, RankMismatchError, ShardingError
from tests.adversary import make_adversarial
from tests.compare import EXACT, assert_same, full_weights
from tests.counts import engine_inside, heard_collectives
from tests.models import DIM, Adapter, Layer, Stack, vector_batch
from tests.races import detect_races
from tests.ranks import RankContext, everywhere, on_ranks
from tests.reference import (
    ALL_SLOTS,
    FP32,
    adamw,
    assert_trains_like_plain,
    built,
    sharded_model,
    stack_step,
    train_stack,
)
from tests.scenarios import BF16, PRECISIONS, AdapterStack
from tests.simulated import backward_elsewhere, late, simulated_device


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
def test_a_parameter_frozen_on_one_rank_alone_is_refused(context: RankContext) -> None:
    """Its piece there would keep its value. The rest of its unit trains. Afterwards training goes on."""
    model = sharded_model()
    for frozen in (True, False):
        model.layers[1].linear.bias.requires_grad_(not (frozen and context.rank == 1))
        with pytest.raises(RankMismatchError, match="freeze the same") if frozen else contextlib.nullcontext():
            stack_step(model, context.call(0))
        model.zero_grad()


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


# -- packed weights: their bytes stay, and adapters on them train as in one process -----------------------------------

_WIDTH = 64  # bitsandbytes quantizes blocks of 64 elements


class _Base(Stack):
    """What the models below have in common: layers with a packed base and an adapter each, and a frozen head."""

    is_checkpointed = False

    def __init__(self, bases: list[Any]) -> None:
        super().__init__((_WIDTH,))
        self.first = nn.Linear(DIM, _WIDTH)
        self.layers = nn.ModuleList(Layer(_WIDTH) for _ in bases)
        for layer, base in zip(self.layers, bases, strict=True):
            layer.linear = Adapter(base)
        self.head.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))

    def order(self) -> Any:
        for layer in self.layers:
            yield functools.partial(checkpoint, layer, use_reentrant=False) if self.is_checkpointed else layer


def _four_bit(storage: torch.dtype = torch.uint8, *, nested: bool = True, checkpointed: bool = False) -> nn.Module:
    """A model whose layers have bases of bitsandbytes, quantized as `load_in_4bit` does it."""
    bnb: Any = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install streamshard[test]")
    options = {"compress_statistics": nested, "quant_type": "nf4", "quant_storage": storage}
    bases = [bnb.nn.Linear4bit(_WIDTH, _WIDTH, compute_dtype=torch.float32, **options) for _ in range(3)]
    model = _Base([base.requires_grad_(False) for base in bases]).to("cpu")
    model.is_checkpointed = checkpointed
    return model


class _Buffers(nn.Module):
    """A linear layer as GPTQ and AWQ keep it: 4-bit weights and zeros in words, and scales for groups of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features = self.out_features = _WIDTH
        for name, rows in (("qweight", _WIDTH // 8), ("qzeros", 1)):
            self.register_buffer(name, torch.randint(-(2**31), 2**31 - 1, (rows, _WIDTH), dtype=torch.int32))
        self.register_buffer("scales", torch.full((1, _WIDTH), 0.02, dtype=torch.float16))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Holds Parameters, as HQQ's layers give them."""
        return super().state_dict(*args, **{**kwargs, "keep_vars": True})

    def forward(self, x: Tensor) -> Tensor:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)[:, None]
        weight = ((self.qweight.unsqueeze(1) >> shifts) & 15).flatten(0, 1) - (self.qzeros & 15)
        return F.linear(x, (weight * self.scales).to(x.dtype).t())


def _as_parameters(model: nn.Module) -> nn.Module:
    """As docs/guide/peft.md says."""
    for module in model.modules():
        if "qweight" in module._buffers:
            packed = module._buffers.pop("qweight")
            module.register_parameter("qweight", nn.Parameter(packed, requires_grad=False))
    return model


def _torchao(name: str, *, checkpointed: bool = False) -> nn.Module:
    torchao: Any = pytest.importorskip("torchao.quantization", reason="needs torchao: pip install streamshard[test]")
    model = _Base([nn.Linear(_WIDTH, _WIDTH).requires_grad_(False) for _ in range(3)])
    for layer in model.layers:
        if name == "NF4Tensor":
            weight = torchao.NF4Tensor.from_tensor(layer.linear.base.weight.data, 64, 32)
            layer.linear.base.weight = nn.Parameter(weight, requires_grad=False)
        else:
            torchao.quantize_(layer.linear.base, getattr(torchao, name)())
    model.is_checkpointed = checkpointed
    return model


def _packed(model: nn.Module) -> dict[str, Tensor]:
    parts = (".base.weight", "data", "qweight")
    full = {name: each.view(torch.uint8) for name, each in full_weights(model).items() if name.endswith(parts)}
    assert len(full) == 3
    return full


FORMS: dict[str, Any] = {
    "uint8": lambda: _four_bit(),
    "bf16 storage, not nested": lambda: _four_bit(torch.bfloat16, nested=False, checkpointed=True),
    "buffers as parameters": lambda: _as_parameters(_Base([_Buffers() for _ in range(3)])),
    "torchao int8": lambda: _torchao("Int8WeightOnlyConfig"),
    "torchao intx": lambda: _torchao("IntxWeightOnlyConfig"),
    "torchao nf4": lambda: _torchao("NF4Tensor", checkpointed=True),
}


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "form"), [(1 + 2 * (number % 2), form) for number, form in enumerate(FORMS)] + [(2, "uint8")]
)
def test_adapters_on_packed_weights_train_as_in_one_process(context: RankContext, form: str) -> None:
    """In training, evaluation and generation no packed byte changes."""
    model = assert_trains_like_plain(context, FORMS[form], stack_step, optimizer=adamw)
    model.eval()  # in eval mode bitsandbytes would repack the weights, on some CPUs
    with torch.no_grad():
        model(vector_batch(9, context.rank))
    assert_same(_packed(model), _packed(built(FORMS[form])), "bytes", EXACT)
    assert set(model.full_state_dict(rank0_only=False)) == set(built(FORMS[form]).state_dict())


@on_ranks(2)
@pytest.mark.parametrize("form", ["uint8", "torchao nf4"])
def test_rank_0_has_the_scales_of_all_ranks(context: RankContext, form: str) -> None:
    """Ranks with other seeds, which have quantized other weights."""
    torch.manual_seed(context.rank)
    model = StreamShard(FORMS[form](), precision=FP32)
    out = model(vector_batch(0, 0))
    assert torch.equal(*everywhere(out.detach()))
    torch.manual_seed(0)
    assert torch.allclose(out, FORMS[form]()(vector_batch(0, 0)), atol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("form", ["uint8", "torchao int8"])
def test_a_checkpoint_keeps_packed_bytes_and_refuses_other_scales(
    context: RankContext, form: str, tmp_path: Path
) -> None:
    model = sharded_model(FORMS[form])
    optimizer = adamw(model)
    stack_step(model, context.call(0))
    optimizer.step()
    save_checkpoint(tmp_path, model, optimizer)
    weight = model.layers[0].linear.base.weight  # classes of bitsandbytes copy in a way of their own
    with pytest.raises(ShardingError, match=r"copy\(\) of parameter 'layers.0.linear.base.weight' .*copy.deepcopy\(\)"):
        copy.copy(weight)
    assert torch.equal(copy.deepcopy(weight), weight)
    again = sharded_model(FORMS[form])
    load_checkpoint(tmp_path, again, adamw(again))
    assert_same(full_weights(again), full_weights(model), "state", EXACT)
    torch.manual_seed(11)
    with pytest.raises(CheckpointError, match="quantized with other scales"):
        load_checkpoint(tmp_path, other := StreamShard(FORMS[form](), precision=FP32), adamw(other))


def test_packed_weights_that_cannot_be_sharded_are_refused_by_name() -> None:
    """Before any other rank is met."""
    bnb: Any = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install streamshard[test]")
    repacked: Any = _four_bit()
    repacked.layers[0].linear.base.weight.quant_state.packing_format_for_cpu = True
    eight_bit = nn.Sequential(bnb.nn.Linear8bitLt(_WIDTH, _WIDTH, has_fp16_weights=False))
    eight_bit[0].weight.data = torch.zeros(_WIDTH, _WIDTH, dtype=torch.int8)
    strided: Any = _torchao("Int8WeightOnlyConfig")
    weight = strided.layers[1].linear.base.weight
    weight.scale = weight.scale.expand(_WIDTH, 2)
    for model, said in (
        (nn.Sequential(bnb.nn.Linear4bit(_WIDTH, _WIDTH)), r"'0\.weight' is not quantized yet"),
        (repacked, r"layers\.0\.linear\.base\.weight' was repacked for a CPU"),
        (eight_bit, r"'0\.weight' is a Int8Params"),
        (_torchao("Int8WeightOnlyConfig").requires_grad_(True), r"'layers\.0\.linear\.base\.weight' is a Int8Tensor"),
        (strided, r"'layers\.1\.linear\.base\.weight' is a Int8Tensor"),
    ):
        with pytest.raises(ShardingError, match=said):
            StreamShard(model)


# -- torchao's tensors, which consist of others -----------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("form", ["torchao int8", "torchao nf4"])
def test_parts_are_guarded_as_weights_are(context: RankContext, form: str) -> None:
    """Reads by another layer, and writes by the own one, of the part in the slot; torch sees neither."""
    model = sharded_model(FORMS[form], weight_slots=2)
    kinds = {type(layer.linear.base.weight).__name__ for layer in model.layers}
    assert kinds == {"Int8Tensor" if "int8" in form else "NF4Tensor"}
    part = "qdata" if "int8" in form else "quantized_data"

    def read(module: nn.Module, args: Any) -> None:
        getattr(model.layers[2].linear.base.weight, part).sum()

    def write(module: Any, args: Any) -> None:
        getattr(module.linear.base.weight, part).add_(1)

    for hook, message in ((read, r"layers\.2\..*weight' is computed with"), (write, r"layers\.1\..*weight' was chang")):
        handle = model.layers[1].register_forward_pre_hook(hook)
        with pytest.raises(ShardingError, match=message):
            model(vector_batch(0, context.rank))
        handle.remove()


@on_ranks(2)
def test_packed_weights_are_not_loaded_or_exported(context: RankContext, tmp_path: Path) -> None:
    """Scales belong to them."""
    model = StreamShard(built(FORMS["torchao int8"]), precision=FP32)
    full = model.full_state_dict(rank0_only=False)
    with pytest.raises(ShardingError, match=r"load_state_dict\(\) of 'layers.0.linear.base.weight', a Int8Tensor"):
        model.load_state_dict(full)
    model.load_state_dict({name: value for name, value in full.items() if "base.weight" not in name}, strict=False)
    with pytest.raises(CheckpointError, match=r"'layers.0.linear.base.weight' is quantized; only unquantized"):
        export_safetensors(model, tmp_path)


@on_ranks(1, 2)
def test_a_packed_base_streams_from_host_memory(context: RankContext) -> None:
    """Its bytes are fetched twice in a step, late, and stay the same. Adapters train as without ``offload``."""

    def trained(**settings: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = sharded_model(FORMS["uint8"], **settings)
        with late(model):
            train_stack(model, adamw(model), context)
            return full_weights(model), _packed(model)

    with simulated_device(), backward_elsewhere():
        weights, packed = trained(weight_slots=2)
        found = trained(offload="state")
    assert_same(found[0], weights, "weights", EXACT)
    assert_same(found[1], packed, "bytes", EXACT)

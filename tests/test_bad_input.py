"""Bad input raises before anything is allocated or changed, names the culprit, and leaves the model usable."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from streamshard import Precision, StreamShard, load_checkpoint, save_checkpoint
from streamshard import build as build_module
from streamshard.errors import ConfigError, RankMismatchError, ShardingError, StreamShardError, UnitError, warn_user
from tests.compare import full_grads
from tests.faults import case
from tests.launched import Launched, run_script
from tests.models import Block, Layer, Stack, TinyLM
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, lm_step, stack_step
from tests.simulated import simulated_device


def _state_of(model: nn.Module) -> list[object]:
    """What a failed call must not change: classes, attributes, hooks, Parameters, their storage and their values."""
    return [
        *((name, type(each), sorted(vars(each)), len(each._forward_hooks)) for name, each in model.named_modules()),
        *((name, id(p), p.data_ptr(), p.requires_grad, p.tolist()) for name, p in model.named_parameters()),
    ]


def assert_refused(model: nn.Module, error: type[StreamShardError], match: str, **settings: Any) -> None:
    """`StreamShard(model, ...)` raises such an error on this rank and changes nothing."""
    before = _state_of(model)
    with pytest.raises(error, match=match):
        StreamShard(model, **settings)
    assert _state_of(model) == before


def assert_trains(context: RankContext, model: nn.Module, **settings: Any) -> None:
    sharded = StreamShard(model, **{"precision": FP32, **settings})
    step = lm_step if isinstance(model, TinyLM) else stack_step
    step(sharded, context.call(0))
    assert any(grad is not None for grad in full_grads(sharded).values())


BAD_MODELS: dict[str, tuple[Callable[[int], Any], str]] = {
    "no parameters": (lambda size: nn.Sequential(nn.ReLU(), nn.Tanh()), "Sequential.*no parameters"),
    "no module": (lambda size: [nn.Linear(2, 2)], "list"),
    "lazy": (lambda size: nn.Sequential(Layer(), nn.LazyLinear(1)), r"'1\.weight' of a lazy module.*run one forward"),
    "inside DDP": (lambda size: DistributedDataParallel(TinyLM()), "DistributedDataParallel.*leave it out"),
    "sharded already": (lambda size: StreamShard(TinyLM()), "already sharded"),
    "a part of a sharded model": (lambda size: StreamShard(Stack()).layers[0], "already sharded, as a part of"),
    "around a sharded model": (
        lambda size: nn.Sequential(nn.Embedding(4, 4), StreamShard(TinyLM())),
        r"(?s)1.*already sharded.*shard only the module around it",
    ),
    "FSDP2": (
        lambda size: fully_shard(TinyLM(), mesh=init_device_mesh("cpu", (size,))),
        "was given to fully_shard, .*leave fully_shard out",
    ),
}


@on_ranks(2)
def test_models_that_cannot_be_sharded_are_refused(context: RankContext) -> None:
    for what, (make, match) in BAD_MODELS.items():
        with case(what), pytest.raises(ShardingError, match=match):
            StreamShard(make(context.world_size))


@on_ranks(2)
def test_parameters_of_other_dtypes_are_refused_by_name(context: RankContext) -> None:
    """Complex numbers, truth values, and fp64, which fp32 shards would round."""
    for dtype in [torch.complex64, torch.bool, torch.float64]:
        with case(dtype):
            model, value = TinyLM(), torch.zeros(3, dtype=dtype)
            model.blocks[1].register_parameter("odd", nn.Parameter(value, requires_grad=value.is_complex()))
            assert_refused(model, ShardingError, rf"blocks\.1\.odd.*{value.dtype}")
            if dtype is torch.float64:
                trained: Any = StreamShard(Stack().double().float(), precision="fp32")
                trained(torch.ones(2, 16, dtype=dtype)).sum().backward()
            del model.blocks[1]._parameters["odd"]
            assert_trains(context, model)


# Of a `TinyLM`.
BAD_UNITS: dict[str, tuple[Any, str]] = {
    "a block and a part of it": (["blocks.1", "blocks.1.attention"], r"blocks\.1.*overlap"),
    "a name that is not there": (["blocks.9"], r"'blocks\.9'.*neither a module inside the model"),
    "a misspelt name": (["blocks.l"], r"'blocks\.l'.*Did you mean 'blocks\.\d'"),
    "a misspelt class": (["Blok"], "'Blok'.*Did you mean 'Block'"),
    "a class that is not there": ([nn.Conv2d], r"Conv2d"),
    "a module of another model": ([nn.Linear(4, 4)], r"Linear.*neither a module inside the model"),
    "a unit without parameters": (["blocks.0.dropout"], r"blocks\.0\.dropout.*no parameters"),
    "a list of layers": ("blocks", r"'blocks' is a ModuleList, which has no forward.*units=list\(model"),
    "a predicate": (lambda module: isinstance(module, Block), "neither a module inside the model nor the class"),
}
BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "one weight slot": ({"weight_slots": 1}, "weight_slots=1"),
    "some weight slots": ({"weight_slots": "some"}, "weight_slots='some'"),
    "a number of gradient slots": ({"grad_slots": 2}, "grad_slots=2: wanted 'all'"),
    "a flag": ({"grad_slots": True}, "grad_slots=True"),
    "blocks of nothing": ({"align_pieces_to": 0}, "align_pieces_to=0"),
    "precision by name": (
        {"precision": "bflot16"},
        "'bflot16': wanted .* or a streamshard.Precision.* mean 'bfloat16'",
    ),
    "a dtype of no float": ({"precision": torch.int8}, "precision=torch.int8: wanted a floating-point"),
    "a dtype by name": ({"precision": Precision}, "precision=<class .*: wanted a floating-point"),
    "a place": ({"offload": "cpu"}, "offload='cpu': wanted one of None, state. Did you mean 'state'"),
    "state in the CPU's memory": ({"offload": "state"}, "whose memory is the host's: leave it out"),
    "on a device, all weight slots": ({"offload": "state", "weight_slots": "all"}, "streams layers from host memory"),
    "on a device, all gradient slots": ({"offload": "state", "grad_slots": "all"}, "streams layers from host memory"),
    "FSDP2's argument": ({"reshard_after_forward": True}, "reshard_after_forward is .* Did you mean 'weight_slots'"),
    "a mesh that is none": ({"mesh": 3}, "mesh=3"),
    "a misspelt argument": ({"grad_slot": 2}, "grad_slot is no argument of StreamShard: .*. Did you mean 'grad_slots'"),
}


@on_ranks(2)
def test_bad_units_and_settings_are_refused_by_name(context: RankContext) -> None:
    model = TinyLM()
    assert_refused(model, UnitError, "whole model", units=[model])
    for what, (units, match) in BAD_UNITS.items():
        with case(what):
            assert_refused(model, UnitError, f"(?s){match}", units=units)
    for what, (settings, match) in BAD_SETTINGS.items():
        with case(what), simulated_device() if "on a device" in what else contextlib.nullcontext():
            assert_refused(model, ConfigError, match, **settings)
    assert_trains(context, model)


@on_ranks(2)
def test_a_word_that_is_almost_right_is_told_the_right_one(context: RankContext, tmp_path: Path) -> None:
    model: Any = StreamShard(TinyLM(), precision=FP32)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match=r"directory is a TinyLM: .*Did you mean save_checkpoint\(directory, model"):
        save_checkpoint(model, optimizer, str(tmp_path))  # type: ignore[arg-type]
    save_checkpoint(tmp_path, model, optimizer, {"epochs": 3})
    with pytest.raises(KeyError, match=r"'epoch': the checkpoint's keys are \['epochs'\]. Did you mean 'epochs'"):
        load_checkpoint(tmp_path, model, optimizer)["epoch"]


@on_ranks(2)
def test_only_the_first_rank_warns_of_a_model_without_layers(context: RankContext) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        StreamShard(nn.Sequential(nn.Linear(4, 4)), precision=FP32)
    assert ["Sequential has no repeated layers" in str(each.message) for each in said] == [True] * (context.rank == 0)


# By what differs: what rank 1 does to its model, its settings, and what the error says.
DIFFERENCES: dict[str, tuple[Callable[[Any], object], dict[str, Any], str]] = {
    "shapes": (lambda m: setattr(m.layers[1], "linear", nn.Linear(16, 17)), {}, r"layers\.1\.linear\.weight"),
    "frozen parameters": (lambda m: m.layers[2].requires_grad_(False), {}, r"layers\.2\.linear"),
    "tied parameters": (
        lambda m: setattr(m.layers[2].linear, "weight", m.layers[1].linear.weight),
        {},
        r"layers\.[12]\.linear\.weight",
    ),
    "units": (lambda m: None, {"units": ["layers.1", "layers.2"]}, "rank"),
    "precision": (lambda m: None, {"precision": FP32}, "rank"),
    "resident layers": (lambda m: None, {"resident": ["layers.1"]}, "rank"),
}


@on_ranks(2)
def test_ranks_with_different_models_or_settings_are_refused_on_every_rank(context: RankContext) -> None:
    for what, (change, settings, match) in DIFFERENCES.items():
        with case(what):
            model = Stack()
            if context.rank == 1:
                change(model)
            assert_refused(model, RankMismatchError, f"(?s){match}", **(settings if context.rank == 1 else {}))
            dist.barrier()
    assert_trains(context, model)
    with mock.patch.object(build_module, "__version__", f"0.{context.rank}"):
        told = "rank 0 has StreamShard 0.0 and torch 2.*, rank 1 has StreamShard 0.1 and torch 2"
        assert_refused(Stack(), RankMismatchError, told)


@on_ranks(2)
def test_one_rank_whose_model_is_refused_does_not_leave_the_other_hanging(context: RankContext) -> None:
    model = Stack()
    with pytest.raises(StreamShardError, match=r"nowhere" if context.rank else r"rank 1|nowhere"):
        StreamShard(model, units=["nowhere"] if context.rank else None)


@on_ranks(2)
def test_copying_pickling_and_ddp_raise_with_a_hint(context: RankContext, tmp_path: Path) -> None:
    model: Any = StreamShard(TinyLM(), precision=FP32)
    saved = tmp_path / f"{context.rank}.pt"
    for action in (pickle.dumps, copy.copy, lambda m: torch.save(m, saved), lambda m: copy.deepcopy(m.blocks[0])):
        with pytest.raises(StreamShardError, match="full_state_dict|summon_full_params|export_safetensors"):
            action(model)
    with pytest.raises(StreamShardError, match="shard a second model and load .*full_state_dict"):
        copy.deepcopy(model)
    with pytest.raises(StreamShardError, match="DistributedDataParallel.*Leave the wrapper out"):
        DistributedDataParallel(model)
    assert not hasattr(model, "module")  # libraries would take it for a wrapper
    lm_step(model, context.call(0))


@pytest.mark.ranks
def test_without_a_process_group_and_a_launcher_the_error_says_how_to_start(tmp_path: Path) -> None:
    script = """
        from streamshard import StreamShard
        from tests.models import TinyLM
        StreamShard(TinyLM())
    """
    ((code, output),) = Launched(0, tmp_path, run_script, script).end()
    assert code == 1
    last = output.strip().splitlines()[-1]
    assert "streamshard.errors." in last
    assert "torchrun" in last


def test_a_script_whose_name_begins_like_the_package_counts_as_the_users() -> None:
    """Warnings point at its line, in a clone with the script beside the package."""
    script = f"{Path(build_module.__file__).parent}_train.py"
    with pytest.warns(UserWarning, match="^words$") as caught:
        exec(compile("warn_user('words')", script, "exec"), {"warn_user": warn_user})
    assert caught[0].filename == script

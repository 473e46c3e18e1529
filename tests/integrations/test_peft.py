"""PEFT's methods on sharded models: they train as without sharding, and what is saved loads without it."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from streamshard import CheckpointError, ShardingError, StreamShard, export_safetensors
from streamshard.comm.streams import Collective
from streamshard.core.module_state import engine_of
from tests import families
from tests.compare import assert_same, full_weights
from tests.counts import heard_collectives
from tests.integrations.accelerating import on_ranks
from tests.integrations.models import make_rows
from tests.integrations.trainers import launched, train
from tests.launched import Launched, run_file
from tests.models import token_batch
from tests.ranks import RankContext
from tests.reference import FP32, Call, assert_trains_like_plain, sgd

peft: Any = pytest.importorskip("peft", reason="PEFT is not installed")


def step(model: nn.Module, call: Call) -> Tensor:
    tokens = token_batch(call.step, call.rank).to(next(model.parameters()).device)
    return call.backward(model(input_ids=tokens, labels=tokens).loss)


def lora(**options: Any) -> Any:
    defaults = {"r": 3, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**{**defaults, **options})


def method(name: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(peft, name)(task_type="CAUSAL_LM", **options)


CONFIGS: dict[str, Callable[[], Any]] = {
    "lora": lora,
    "dora": functools.partial(lora, use_dora=True),
    "modules to save": functools.partial(lora, modules_to_save=["lm_head"]),
    "embedding": functools.partial(lora, target_modules=["embed_tokens", "q_proj"]),
    "tokens": method("TrainableTokensConfig", token_indices=[1, 5, 7]),
    "vera": method("VeraConfig", r=3, target_modules=["q_proj", "v_proj"]),
    "prompt": method("PromptTuningConfig", num_virtual_tokens=3),
    "projected prefix": method(
        "PrefixTuningConfig", num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=8
    ),
    "experts": functools.partial(
        lora, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    ),
}


def _base(kind: str = "lora") -> Any:
    """The same at each call."""
    torch.manual_seed(3)
    return (families.mixtral if kind == "experts" else families.llama)(num_hidden_layers=2)


def _build(kind: str = "lora") -> Any:
    return peft.get_peft_model(_base(kind), CONFIGS[kind]())


def _trained(context: RankContext) -> Any:
    """A sharded model after two steps."""
    model: Any = StreamShard(_build(), precision=FP32)
    optimizer = sgd(model)
    for number in range(2):
        step(model, Call(number, context.rank, context.world_size, 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return model


@on_ranks(2)
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_method_trains_and_is_saved_as_without_sharding(context: RankContext, tmp_path: Path, kind: str) -> None:
    """Loss, gradients and weights, of what is frozen too; the same names and bytes, and PEFT makes the same model."""
    build = functools.partial(_build, kind)
    model: Any = assert_trains_like_plain(context, build, step, steps=3, checked=(0, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT says that it saves embeddings
        model.save_pretrained(tmp_path / "ours")
    wanted = _saved_without_sharding(model, build, tmp_path / f"plain{context.rank}")
    found = _contents(tmp_path / "ours")
    assert found.keys() == wanted.keys()
    assert_same(found, wanted, "what is saved")
    assert not list(tmp_path.glob(".*partial"))
    tokens = token_batch(0, 0)
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens.to(context.device)).logits
        loaded = peft.PeftModel.from_pretrained(_base(kind), tmp_path / "ours").eval()
        assert_same({"logits": logits}, {"logits": loaded(input_ids=tokens).logits}, "logits of what is loaded")


@on_ranks(2)
def test_adalora_is_refused_because_it_ranks_rows_of_adapters(context: RankContext) -> None:
    """AdaLoRA's budget: a rank would sum up the rows that it has. Its forward reads adapters of all layers."""
    budget = {"init_r": 3, "target_r": 2, "tinit": 0, "tfinal": 0, "total_step": 4, "deltaT": 1}
    config = method("AdaLoraConfig", target_modules=["q_proj"], **budget)()
    model: Any = StreamShard(peft.get_peft_model(_base(), config), precision=FP32)
    with pytest.raises(ShardingError, match=r"lora_A.default' is computed with while its layer does not run"):
        step(model, Call(0, context.rank, context.world_size, 1.0))
    options: dict[str, Any] = {"resident": [nn.ParameterDict]}
    model = assert_trains_like_plain(context, lambda: peft.get_peft_model(_base(), config), step, **options)
    step(model, Call(3, context.rank, context.world_size, 1.0))
    with pytest.raises(ShardingError, match=r"mean\(\) of parameter '.*lora_A.default' outside"):
        model.base_model.update_and_allocate(1)


@on_ranks(2)
def test_a_method_with_hooks_on_parameters_is_refused(context: RankContext) -> None:
    """CPT, as OSF: the hooks would never run. The error names the parameter and comes in the first forward."""
    marks = {"cpt_token_ids": [1, 2, 3, 4], "cpt_mask": [1] * 4, "cpt_tokens_type_mask": [1, 2, 3, 4]}
    model: Any = StreamShard(peft.get_peft_model(_base(), method("CPTConfig", **marks)()), precision=FP32)
    with pytest.raises(ShardingError, match=r"a hook on parameter '\S+delta_embedding\.weight' would never run"):
        step(model, Call(0, context.rank, context.world_size, 1.0))


def _contents(directory: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {
        f"{path.relative_to(directory)}: {name}": tensor
        for path in sorted(directory.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def _saved_without_sharding(model: Any, build: Callable[[], Any], directory: Path, **given: Any) -> dict[str, Tensor]:
    """What PEFT saves of the same weights."""
    plain = build()
    with torch.no_grad():
        whole = full_weights(model)
        for name, param in plain.named_parameters():
            param.copy_(whole[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain.save_pretrained(directory, **given)
    return _contents(directory)


def _with_native_adapter() -> Any:
    """Adapted by transformers, without PEFT's class around the model."""
    model: Any = _base()
    model.add_adapter(lora())
    return model


@on_ranks(2)
def test_trainer_saves_adapters_of_add_adapter_as_with_ddp(context: RankContext, tmp_path: Path) -> None:
    """Only the adapters are gathered, and transformers loads them."""
    from transformers import Trainer

    from streamshard.integrations.transformers import StreamShardTrainer

    with launched(context):
        for each in (Trainer, StreamShardTrainer):
            out = tmp_path / each.__name__
            data, saving = make_rows("llama"), {"save_strategy": "steps", "save_steps": 2}
            run = train(each, _with_native_adapter(), out, data, ddp_find_unused_parameters=False, **saving)
            run.trainer.save_model(str(out))
        run.trainer.model.save_pretrained(tmp_path / "model")
        dist.barrier()
    ours = tmp_path / "StreamShardTrainer"
    for directory in (ours, ours / "checkpoint-2"):
        other = tmp_path / "Trainer" / directory.relative_to(ours)
        assert {path.name for path in directory.iterdir()} == {path.name for path in other.iterdir()}
    theirs, trained, model = (_contents(tmp_path / each) for each in ("Trainer", ours.name, "model"))
    for found in (trained, model):
        assert_same({name: found[name] for name in model}, {name: theirs[name] for name in model}, "saved")
    loaded: Any = _base()
    loaded.load_adapter(ours)
    assert_same(loaded.state_dict(), run.weights, "weights of what is loaded")


@on_ranks(2)
def test_save_pretrained_takes_pefts_arguments_and_raises_on_all_ranks(context: RankContext, tmp_path: Path) -> None:
    """One adapter of two; weights that are given, on one rank. An earlier save survives an error."""

    def two_adapters() -> Any:
        made = _build()
        made.add_adapter("other", lora(r=2))
        return made

    model: Any = StreamShard(two_adapters(), precision=FP32)
    model.save_pretrained(tmp_path / "one", selected_adapters=["other"], is_main_process=context.rank == 0)
    assert not (tmp_path / "one/adapter_model.safetensors").exists()
    assert (tmp_path / "one/other/adapter_model.safetensors").exists()
    wanted = _saved_without_sharding(model, two_adapters, tmp_path / f"plain{context.rank}")
    # Nothing would load the names of a model without PeftModel; `save_pretrained` would save adapters only.
    others = [StreamShard(each, precision=FP32) for each in (_build().base_model.model, _with_native_adapter())]
    told = r"has adapters of PEFT.*shard the PeftModel.*model.save_pretrained\("
    for refused in (model, *others):
        with pytest.raises(CheckpointError, match=told):
            export_safetensors(refused, tmp_path / "export")
    full = model.full_state_dict()
    if context.rank == 0:
        model.save_pretrained(tmp_path / "given", state_dict=full)
        assert _contents(tmp_path / "given").keys() == wanted.keys()
    before = _contents(tmp_path / "one")
    with pytest.raises(CheckpointError, match="nobody"):
        model.save_pretrained(tmp_path / "one", selected_adapters=["nobody"])
    assert_same(_contents(tmp_path / "one"), before, "what is saved")
    assert not list(tmp_path.glob(".*partial"))


@on_ranks(2)
def test_adapters_are_converted_as_without_sharding(context: RankContext, tmp_path: Path) -> None:
    """PiSSA's and OLoRA's: PEFT loads the initial adapter beside them. Only units with adapters are gathered for it."""
    initial = tmp_path / f"initial{context.rank}"
    _build().save_pretrained(initial)
    model = _trained(context)
    engine, given = engine_of(model), {"path_initial_model_for_weight_conversion": str(initial)}
    with heard_collectives(engine) as heard:
        model.save_pretrained(tmp_path / "ours", **given)
    layers = [unit.flat_params[0].tag for unit in engine.units if "layers" in unit.name]  # what trains
    assert heard == {kind: layers if kind is Collective.ALL_GATHER else [] for kind in Collective}
    wanted = _saved_without_sharding(model, _build, tmp_path / f"plain{context.rank}", **given)
    assert_same(_contents(tmp_path / "ours"), wanted, "what is saved")
    step(model, Call(2, context.rank, context.world_size, 1.0))


@on_ranks(2)
def test_merging_and_new_adapters_of_a_sharded_model_are_refused(context: RankContext, tmp_path: Path) -> None:
    """Merging computes with pieces, and no rank could save its result. An adapter that is new is this rank's alone."""
    model = _trained(context)
    with pytest.raises(ShardingError, match=r"matmul\(\) of parameter .*lora_B.default.weight' outside of its"):
        model.merge_adapter()
    in_one_process = r"save_pretrained\(directory\) on all ranks, and merge in one process"
    for part in (model, model.base_model):
        with pytest.raises(ShardingError, match=in_one_process):
            part.merge_and_unload()
        with pytest.raises(ShardingError, match=in_one_process), model.summon_full_params():
            part.merge_and_unload()
    model.save_pretrained(tmp_path)
    model.load_adapter(tmp_path, "new")
    with pytest.raises(ShardingError, match=r"lora_[AB]\.new"):
        step(model, Call(2, context.rank, context.world_size, 1.0))


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("script", "rounding"),
    [
        ("lora", 2e-4),
        # On some CPUs bitsandbytes computes in bf16 without sharding.
        pytest.param(
            "qlora", 1e-2, marks=pytest.mark.skipif(not find_spec("bitsandbytes"), reason="needs bitsandbytes")
        ),
    ],
)
def test_scripts_of_the_page_train_save_and_load(script: str, rounding: float, tmp_path: Path) -> None:
    """Two processes as torchrun starts them; the adapter computes the same without sharding."""
    job = [f"docs/examples/{script}.py", str(tmp_path / "out")]
    (code, told), (other, _) = Launched(2, tmp_path, run_file, job).end(timeout_s=200.0)
    assert (code, other) == (0, 0), told
    found = re.search(r"loss (\S+) -> (\S+); (\S+) with the trained model, (\S+) with", told)
    assert found is not None, told
    first, last, trained, loaded = map(float, found.groups())
    assert last < first - 0.2
    assert loaded == pytest.approx(trained, abs=rounding)

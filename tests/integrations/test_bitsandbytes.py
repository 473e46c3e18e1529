"""Models that transformers loads quantized, with adapters on them: trained, saved and loaded as in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks._live import LiveBytes, shared_bytes
from streamshard import CheckpointError, Precision, ShardingError, StreamShard, export_safetensors, plan
from streamshard.integrations.accelerate import StreamShardAccelerator
from tests import families
from tests.compare import EXACT, assert_same, full_weights
from tests.integrations.accelerating import on_ranks
from tests.integrations.models import make_rows, make_texts, make_tokenizer
from tests.integrations.trainers import Run, and_sharded, assert_equal, launched, train
from tests.models import token_batch
from tests.ranks import RankContext, RankPool
from tests.reference import FP32, Call, adamw, assert_trains_like_plain, seed

bnb: Any = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install streamshard[test]")
peft: Any = pytest.importorskip("peft", reason="needs PEFT: pip install streamshard[hf]")
from tests.integrations.test_peft import CONFIGS, lora, method, step  # noqa: E402

_OWN = Precision(param_dtype=None)


def _saved(context: RankContext, directory: Path, dtype: torch.dtype = torch.float32, count: int = 1) -> list[Path]:
    """Directories with one model each, not quantized."""
    paths = [directory / f"base-{number}" for number in range(count)]
    if context.rank == 0:  # transformers writes configs there alone
        for number, path in enumerate(paths):
            torch.manual_seed(number)
            families.llama().to(dtype).save_pretrained(path)
    dist.barrier()
    return paths


def _base(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """The model, loaded in 4 bits. It is in eval mode."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    nested = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    config = BitsAndBytesConfig(load_in_4bit=True, **{**nested, **options})
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config, dtype=dtype)
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):  # without sharding, an evaluation would repack weights on some CPUs
            module.support_avx512bf16_for_cpu = False
    return model


def _adapted(base: Any, config: Any = None, **options: Any) -> Any:
    """The base, prepared and with adapters; `options` are of ``prepare_model_for_kbit_training``."""
    prepared = peft.prepare_model_for_kbit_training(base, **{"use_gradient_checkpointing": False, **options})
    return peft.get_peft_model(prepared, config or lora(target_modules="all-linear"))


_CHECKPOINTING = {"use_gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
# What PEFT computes of quantized weights, or with them, and what stands beside them.
METHODS: dict[str, Callable[[], Any]] = {
    **{name: CONFIGS[name] for name in ("dora", "vera", "prompt", "modules to save")},
    "tokens": lambda: lora(trainable_token_indices=[1, 5]),
    "ia3": method("IA3Config", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "oft": method("OFTConfig", target_modules=["q_proj"], oft_block_size=8, use_cayley_neumann=False),
    "prefix": method("PrefixTuningConfig", num_virtual_tokens=3),
}


def _mirrored(context: RankContext, build: Callable[[Path], Any], directory: Path, **settings: Any) -> Any:
    """Train `build` of a base and compare. The sharded model's ranks have other bases and adapters; rank 0's count."""
    dtype = settings.pop("dtype", torch.float32)
    bases = _saved(context, directory, dtype, context.world_size)
    made: list[int] = []

    def make() -> Any:
        other = context.rank if made else 0
        made.append(other)
        seed(3 + other)
        return build(bases[other])

    model = assert_trains_like_plain(context, make, step, optimizer=adamw, steps=2, checked=[1], **settings)
    assert made == [0, context.rank]
    model.eval()
    with torch.no_grad():
        model(input_ids=token_batch(9, context.rank))
    found, wanted = model.full_state_dict(rank0_only=False), build(bases[0]).state_dict()
    assert set(found) == set(wanted)
    packed = [name for name in wanted if f"{name}.absmax" in wanted]
    assert len(packed) == 21
    bytes_of = [{name: each[name].view(torch.uint8) for name in packed} for each in (found, wanted)]
    assert_same(*bytes_of, "packed bytes", EXACT)
    return model


BUILDS: dict[str, Callable[[Path], Any]] = {
    "as loaded, in eval mode": lambda path: _adapted(_base(path)).eval(),
    "checkpointed": lambda path: _adapted(_base(path), **_CHECKPOINTING).train(),
    **{name: lambda path, make=make: _adapted(_base(path), make()).train() for name, make in METHODS.items()},  # type: ignore[misc]  # mypy sees no default
}


@on_ranks(2)
@pytest.mark.parametrize("name", BUILDS)
def test_adapters_on_a_loaded_base_train_as_in_one_process(context: RankContext, name: str, tmp_path: Path) -> None:
    """On each rank another base and other adapters."""
    _mirrored(context, BUILDS[name], tmp_path)


@on_ranks(2)
def test_each_parameter_computes_in_its_own_dtype(context: RankContext, tmp_path: Path) -> None:
    """With ``Precision(param_dtype=None)`` a model in bf16 has one process's numbers."""

    def build(path: Path) -> Any:
        base = _base(path, torch.bfloat16, bnb_4bit_quant_storage=torch.bfloat16)
        return peft.get_peft_model(base.requires_grad_(False), lora()).train()

    _mirrored(context, build, tmp_path, precision=_OWN, dtype=torch.bfloat16)


@on_ranks(2)
def test_packed_weights_refuse_what_needs_all_bytes(context: RankContext, tmp_path: Path) -> None:
    (path,) = _saved(context, tmp_path)
    plain, model = (_adapted(_base(path)) for _ in range(2))
    model.base_model.model.hf_device_map = {"": "disk"}  # accelerate raises for a base on another device
    with launched(context):
        model = StreamShardAccelerator(precision=FP32).prepare_model(model)
    assert model.hf_device_map == {"": context.device}
    packed = [param for param in model.parameters() if isinstance(param, bnb.nn.Params4bit)]
    assert len(packed) == 21 and {type(param).__name__ for param in packed} == {"Params4bit"}
    assert model.get_nb_trainable_parameters() == plain.get_nb_trainable_parameters()
    assert model.base_model.model.num_parameters() == plain.base_model.model.num_parameters()
    assert packed[0].cpu() is packed[0].to("cpu") is packed[0]
    for refused in (torch.chunk, lambda param, _: bnb.functional.dequantize_4bit(param, param.quant_state)):
        with pytest.raises(ShardingError, match=r"q_proj.base_layer.weight' outside of its model's forward"):
            refused(packed[0], 2)


@on_ranks(2)
def test_a_rank_holds_the_bytes_of_the_plan_and_no_other_tensors(context: RankContext, tmp_path: Path) -> None:
    """Of live storages after two steps. A copy of a layer's packed weights would be 250 KB, one of adapters 25 KB."""
    if context.device.type != "cpu":
        pytest.skip("counts tensors in the host's memory")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 61}
    path = tmp_path / "large"
    if context.rank == 0:
        families.llama(**sizes).save_pretrained(path)
    dist.barrier()
    _adapted(_base(path))  # makes what bitsandbytes keeps
    before, shared_before = LiveBytes().held_bytes, shared_bytes(2)
    model = _adapted(_base(path))
    planned = plan(model, 2, transport="shared-memory", precision=_OWN).stages[0]
    states = [param.quant_state for param in model.parameters() if "quant_state" in vars(param)]
    model = StreamShard(model, precision=_OWN)
    optimizer = adamw(model)
    for number in range(2):  # from the second on, embedding and head take turns with the layers
        step(model, Call(number, context.rank, 2, 1.0))
        optimizer.step()
        optimizer.zero_grad()
    report = model.memory_report()
    assert planned.total_bytes == report.total_bytes + report.adam_bytes
    scales = [t for each in states for t in (each.absmax, each.code, each.offset, each.state2.absmax, each.state2.code)]
    assert report.held_bytes["quantization"] == sum(tensor.nbytes for tensor in scales) > 0
    assert f"{report.numel:,} parameters over" in repr(model) and report.numel == model.num_parameters()
    held = LiveBytes().held_bytes - before + shared_bytes(2) - shared_before
    counters = [moment for state in optimizer.state.values() for moment in state.values() if not moment.ndim]
    others = sum(tensor.nbytes for tensor in (*counters, *model.buffers()))
    # Shared memory has whole pages. Each slot that was freed leaves a part of its first and of its last one.
    assert held == pytest.approx(planned.total_bytes + others, abs=5 * 4096)


@on_ranks(2)
def test_saved_adapters_load_on_a_loaded_base(context: RankContext, tmp_path: Path) -> None:
    (path,) = _saved(context, tmp_path)
    seed(3)
    model = StreamShard(_adapted(_base(path)), precision=FP32)
    optimizer = adamw(model)
    step(model, Call(0, context.rank, 2, 1.0))
    optimizer.step()
    model.eval()
    with pytest.raises(ShardingError, match="merge_and_unload.. of a sharded model"):
        model.merge_and_unload()
    with pytest.raises(CheckpointError, match="has adapters of PEFT"):
        export_safetensors(model, tmp_path / "export")
    whole = StreamShard(_base(path).requires_grad_(False), precision=FP32)
    with pytest.raises(CheckpointError, match="LlamaForCausalLM is quantized; only unquantized weights"):
        export_safetensors(whole, tmp_path / "export")
    model.save_pretrained(tmp_path / "adapter")
    tokens = token_batch(5, 0)
    loaded = peft.PeftModel.from_pretrained(_base(path), tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=tokens).logits, loaded(input_ids=tokens).logits)
    found, wanted = (
        {name: weight for name, weight in each.items() if "lora" in name}
        for each in (model.full_state_dict(rank0_only=False), loaded.state_dict())
    )
    assert_same(found, wanted, "adapters", EXACT)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"])
def test_adapters_on_a_base_of_torchao_train_as_in_one_process(context: RankContext, kind: str, tmp_path: Path) -> None:
    if context.device.type != "cpu":
        pytest.skip("has run on CPUs only")
    torchao: Any = pytest.importorskip("torchao.quantization", reason="needs torchao: pip install streamshard[test]")
    from transformers import AutoModelForCausalLM, TorchAoConfig

    (path,) = _saved(context, tmp_path)

    def build() -> Any:
        options: Any = {"quantization_config": TorchAoConfig(getattr(torchao, kind)()), "dtype": torch.float32}
        return _adapted(AutoModelForCausalLM.from_pretrained(path, **options)).train()

    model = assert_trains_like_plain(context, build, step, optimizer=adamw, steps=2, checked=[1])
    found, wanted = (
        {name: part for name, part in full_weights(each).items() if "base_layer.weight." in name}
        for each in (model, build())
    )
    assert sum(name.endswith("qdata") for name in wanted) == 21
    assert_same(found, wanted, "packed weights", EXACT)


def _own_adapters(trainer: Any) -> None:
    """fp32, as PEFT makes them. TRL casts those of a quantized model to bf16."""
    for param in trainer.model.parameters():
        if param.requires_grad:
            param.data = param.data.float()


def _trainer(name: str) -> tuple[Any, Any, dict[str, Any]]:
    """A trainer's class, data, and what `train` is given."""
    if name == "Trainer":
        from transformers import Trainer

        return Trainer, make_rows("llama"), {}
    trl = pytest.importorskip("trl", reason="needs trl: pip install streamshard[hf]")
    datasets: Any = pytest.importorskip("datasets")
    columns = ("text",) if name == "SFTTrainer" else ("prompt", "chosen", "rejected")
    data = datasets.Dataset.from_dict({each: make_texts(16, (8, 9), i) for i, each in enumerate(columns)})
    given = {"processing_class": make_tokenizer(), "peft_config": lora(target_modules="all-linear")}
    config = getattr(trl, name.replace("Trainer", "Config"))
    return getattr(trl, name), data, {"arguments_class": config, "given": given}


def _run(
    context: RankContext, name: str, out: Path, dtype: torch.dtype, is_plain: bool, resume: Path | None = None
) -> Run:
    """Train, plain or sharded, with the same global batch on any number of ranks."""
    theirs, data, options = _trainer(name)
    (path,) = _saved(context, out / "base", dtype)
    per_device = dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), 4 // context.world_size)
    often = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    own: dict[str, Any] = {"eval_dataset": data[:4] if isinstance(data, list) else data.select(range(4))}
    if not is_plain:
        own["streamshard"] = {"precision": _OWN}
    options |= {"given": {**options.get("given", {}), **own}, "bf16": dtype is torch.bfloat16, **per_device, **often}
    with launched(context):
        seed(3)
        base = _base(path, dtype)
        model = _adapted(base) if name == "Trainer" else peft.prepare_model_for_kbit_training(base, False)
        each = theirs if is_plain else and_sharded(theirs)[1]
        where = out / f"on {context.world_size}"
        return train(each, model, where, data, before=_own_adapters, resume=resume, **options)._replace(trainer=None)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["Trainer", "SFTTrainer", "DPOTrainer"])
def test_trainers_log_what_one_process_logs(ranks: RankPool, name: str, tmp_path: Path) -> None:
    """From the start, and from the other's checkpoint."""
    one, two = (ranks(count, backend="of accelerator") for count in (1, 2))
    theirs, ours = (each.run(_run, name, tmp_path, torch.float32, each is one)[0] for each in (one, two))
    rounding = 1e-5  # of 4-bit kernels: 3e-6 of a step's 1e-2 on some CPUs
    assert_equal(ours, theirs, atol=rounding)
    resumed = two.run(_run, name, tmp_path, torch.float32, False, tmp_path / "on 1" / "checkpoint-2")[0]
    for entry in (*resumed.history, *theirs.history):
        for key in ("num_tokens", "eval_num_tokens"):  # TRL counts again from zero
            entry.pop(key, None)
    assert_equal(resumed, theirs, resumed=True, atol=rounding)


@on_ranks(2)
def test_autocast_equals_ddp_if_parameters_keep_their_dtypes(context: RankContext, tmp_path: Path) -> None:
    """``bf16=True`` with a base in bf16, and norms, head and adapters in fp32. DDP has the whole base on each rank."""
    theirs, ours = (
        _run(context, "Trainer", tmp_path / str(is_plain), torch.bfloat16, is_plain) for is_plain in (True, False)
    )
    assert_equal(ours, theirs)

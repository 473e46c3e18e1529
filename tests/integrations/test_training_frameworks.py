"""axolotl, ms-swift, LLaMA-Factory: with StreamShard each logs the numbers of DistributedDataParallel.

Stand-ins take the frameworks' places in tests of our classes. Other tests start the frameworks, where installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from streamshard import StreamShard
from streamshard.core.module_state import engine_of
from streamshard.errors import ConfigError
from tests.integrations.accelerating import on_ranks
from tests.integrations.models import make_model, make_rows, make_texts, make_tokenizer
from tests.integrations.trainers import assert_equal, launched, train
from tests.launched import ROOT
from tests.ranks import RankContext
from tests.reference import assert_same


class _Config(dict[str, Any]):
    """As axolotl's: keys are attributes, and absent keys are None."""

    __getattr__ = dict.get
    __setattr__ = dict.__setitem__  # type: ignore[assignment]

    def __missing__(self, key: str) -> None:
        return None


def _with_stand_ins(imported: str, **modules: dict[str, Any]) -> Any:
    """Import one of our modules while other modules, ``__`` for each dot in their names, have these contents."""
    made: dict[str, ModuleType] = {}
    for name, contents in modules.items():
        parts = name.split("__")
        for end in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:end]), ModuleType(parts[end - 1]))
        vars(made[".".join(parts)]).update(contents)
    with mock.patch.dict(sys.modules, made):
        sys.modules.pop(imported, None)
        module = importlib.import_module(imported)
        del sys.modules[imported]
        return module, made


def _whole(model: Any) -> dict[str, torch.Tensor]:
    return dict(StreamShard.full_state_dict(model, rank0_only=False))


# -- our classes ------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_axolotls_plugin_trains_as_ddp_and_saves_when_rank_0_alone_saves(context: RankContext, tmp_path: Path) -> None:
    pytest.importorskip("pydantic", reason="needs pydantic")
    from transformers import Trainer

    base, trainers = {"BasePlugin": object}, {"AxolotlTrainer": Trainer}
    names = {"axolotl__integrations__base": base, "axolotl__core__trainers": trainers}
    ours, stand_ins = _with_stand_ins("streamshard.integrations.axolotl", **names)
    plugin, config = (
        ours.StreamShardPlugin(),
        _Config(streamshard={"weight_slots": "all"}, output_dir=str(tmp_path / "out")),
    )
    assert plugin.load_datasets(config) is None
    assert config.device_map == {"": "cpu"} and config.experimental_skip_move_to_device
    with mock.patch.dict(sys.modules, stand_ins):
        sharded = plugin.get_trainer_cls(config)
        with pytest.raises(ConfigError, match="rl: dpo does not go with StreamShardPlugin"):
            plugin.get_trainer_cls(_Config(rl="dpo"))
    with launched(context):
        theirs = train(Trainer, make_model("llama"), tmp_path / "theirs", make_rows("llama"))
        run = train(sharded, make_model("llama"), tmp_path / "ours", make_rows("llama"))
        assert_equal(run, theirs)
        model = run.trainer.model
        assert engine_of(model).plan.keeps_weights
        plugin.post_train(config, model)
        if context.rank == 0:  # as axolotl does
            model.save_pretrained(config.output_dir)
        plugin.post_train(config, model)
    saved = type(make_model("llama")).from_pretrained(config.output_dir)
    assert_same(saved.state_dict(), _whole(model), "saved weights")


@on_ranks(2)
def test_ms_swifts_trainers_train_as_ddp_and_keep_its_arguments(context: RankContext, tmp_path: Path) -> None:
    from transformers import Trainer

    class TrainerFactory:
        @classmethod
        def get_trainer_cls(cls, args: Any) -> type:
            assert args == "arguments"
            return Trainer

    ours, _ = _with_stand_ins("streamshard.integrations.ms_swift", swift__trainers={"TrainerFactory": TrainerFactory})
    ours.shard_trainers(weight_slots="all")
    sharded = TrainerFactory.get_trainer_cls("arguments")
    assert issubclass(sharded, Trainer) and sharded is not Trainer
    assert sharded.__name__ == "Trainer"  # which ms-swift compares
    (tmp_path / "ours").mkdir(exist_ok=True)
    (tmp_path / "ours" / "args.json").write_text("{}")
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    with launched(context):
        theirs = train(Trainer, make_model("llama"), tmp_path / "theirs", make_rows("llama"), **saving)
        run = train(sharded, make_model("llama"), tmp_path / "ours", make_rows("llama"), **saving)
    assert_equal(run, theirs)
    assert engine_of(run.trainer.model).plan.keeps_weights
    files = {each: {file.name for file in (tmp_path / each / "checkpoint-2").iterdir()} for each in ("ours", "theirs")}
    assert files["ours"] == {*files["theirs"], "args.json"}


def _steps(model: Any, optimizer: torch.optim.Optimizer, rank: int, count: int) -> list[float]:
    """Losses on this rank's rows, with the clipping of LLaMA-Factory."""
    losses, rows = [], make_rows("llama")[8 * rank :]
    for step in range(count):
        batch = {name: torch.stack([row[name] for row in rows[2 * step : 2 * step + 2]]) for name in rows[0]}
        losses.append(model(**batch).loss)
        losses[-1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


@on_ranks(2)
@pytest.mark.parametrize("mode", ["init_on_default", "init_on_meta"])
def test_llamafactorys_backend_trains_as_ddp_saves_and_continues(
    context: RankContext, mode: str, tmp_path: Path
) -> None:
    from streamshard.integrations.llamafactory import StreamShardBackend

    if context.rank == 0:
        make_model("llama").save_pretrained(tmp_path / "base")
    torch.distributed.barrier()

    def make() -> Any:
        model = make_model("llama")
        if mode == "init_on_meta":
            with torch.device("meta"):
                model = type(model)(model.config)
        model.config.name_or_path, model._init_mode = str(tmp_path / "base"), mode
        return StreamShardBackend.shard_model(model, {"name": "fsdp2", "weight_slots": "all"}, bf16=False)

    whole: Any = DistributedDataParallel(make_model("llama"))
    wanted = _steps(whole, torch.optim.AdamW(whole.parameters(), lr=1e-2), context.rank, 4)
    model = make()
    assert engine_of(model).plan.keeps_weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.testing.assert_close(_steps(model, optimizer, context.rank, 4), wanted, rtol=1e-4, atol=1e-6)
    assert_same(_whole(model), whole.module.state_dict(), "weights")

    options = {"processor": make_tokenizer(), "save_ckpt_as_hf": True}
    StreamShardBackend.save_checkpoint(model, optimizer, str(tmp_path / "checkpoint"), **options)
    files = {file.name for file in (tmp_path / "checkpoint" / "hf_model").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= files
    other = make()
    resumed = torch.optim.AdamW(other.parameters(), lr=1e-2)
    StreamShardBackend.load_checkpoint(other, resumed, str(tmp_path / "checkpoint"))
    assert _steps(other, resumed, context.rank, 2) == _steps(model, optimizer, context.rank, 2)


@on_ranks(2)
def test_llamafactorys_models_from_rank_0_raise(context: RankContext) -> None:
    from streamshard.integrations.llamafactory import StreamShardBackend

    model = make_model("llama")
    model._init_mode = "init_on_rank0"
    with pytest.raises(ConfigError, match="take init_on_meta"):
        StreamShardBackend.shard_model(model, {"name": "fsdp2"})


@pytest.mark.parametrize("module", ["interface", "hub"])
def test_llamafactorys_registry_gets_the_backend(module: str) -> None:
    """Of 0.9.5 (``hub``), and of later versions."""
    registry: dict[Any, Any] = {}

    class DistributedPlugin:
        def __init__(self, name: str) -> None:
            self.name = name

        def register(self, *method: str) -> Any:
            return lambda made: registry.update({(self.name, *method): made})

    name = f"llamafactory__v1__plugins__trainer_plugins__distributed__{module}"
    module_name = "streamshard.integrations.llamafactory"
    ours, stand_ins = _with_stand_ins(module_name, **{name: {"DistributedPlugin": DistributedPlugin}})
    with mock.patch.dict(sys.modules, stand_ins):
        ours.register()
    if module == "interface":
        assert registry == {("fsdp2",): ours.StreamShardBackend}
    else:
        methods = ("save_model", "save_checkpoint", "load_checkpoint")
        wanted = {("fsdp2", method): getattr(ours.StreamShardBackend, method) for method in methods}
        assert registry == {("fsdp2",): ours.StreamShardBackend.shard_model, **wanted}


# -- the frameworks ---------------------------------------------------------------------------------------------------


def _need(package: str, version: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package} (tried with {version}), whose packages do not go with those of other tests")


def _make_run(directory: Path) -> None:
    """Write a tiny Llama with its tokenizer, and 24 conversations in two formats."""
    tokenizer, turn = make_tokenizer(), "<s> {{ m['role'] }} {{ m['content'] }} </s> "
    tokenizer.chat_template = f"{{% for m in messages %}}{turn}{{% endfor %}}"
    tokenizer.save_pretrained(directory / "model")
    make_model("llama", max_position_embeddings=256).save_pretrained(directory / "model")
    pairs = list(zip(make_texts(24, (3, 6), 1), make_texts(24, (4, 8), 2), strict=True))
    rows = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in pairs]
    (directory / "chat.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    alpaca = [{"instruction": a, "input": "", "output": b} for a, b in pairs]
    (directory / "alpaca.json").write_text(json.dumps(alpaca))
    data = {"tiny": {"path": str(directory / "alpaca.json"), "source": "local", "converter": "alpaca"}}
    (directory / "data.yaml").write_text(json.dumps(data))


def _start(directory: Path, *command: str, **environment: str) -> None:
    """Run a command of a framework on two ranks in `directory`."""
    paths = os.pathsep.join([str(ROOT), str(directory)])
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    everything = {**os.environ, **own, **environment}
    done = subprocess.run(
        [*launcher, *command], cwd=directory, env=everything, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


def _assert_logs_equal(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], steps: int) -> None:
    found, wanted = ([(row["loss"], row["grad_norm"]) for row in log if "loss" in row] for log in (ours, theirs))
    assert len(wanted) == steps
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def _read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


_PLUGINS = """
from axolotl.integrations.base import BasePlugin
from transformers import set_seed
class Seeds(BasePlugin):  # axolotl makes adapters before it sets a seed
    def load_datasets(self, cfg, preprocess=False):
        set_seed(3)
class LoadsOnCpu(BasePlugin):  # on several ranks axolotl itself wants GPUs
    def load_datasets(self, cfg, preprocess=False):
        cfg.device_map, cfg.experimental_skip_move_to_device = {"": "cpu"}, True
"""


_LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}
_LORA |= dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)  # which need CUDA


@pytest.mark.timeout(400)
@pytest.mark.parametrize("adapter", [{}, _LORA])
def test_axolotl_logs_what_it_logs_with_ddp(adapter: dict[str, Any], tmp_path: Path) -> None:
    _need("axolotl", "0.19.0")
    _make_run(tmp_path)
    (tmp_path / "plugins.py").write_text(_PLUGINS)
    data = {"path": "chat.jsonl", "ds_type": "json", "type": "chat_template", "field_messages": "messages"}
    batches = {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3, "num_epochs": 1}
    floats = {"bf16": False, "fp16": False, "tf32": False, "flash_attention": False}
    saving = {"logging_steps": 1, "save_steps": 3, "val_set_size": 0, "dataset_prepared_path": "prepared"}
    steps = {"optimizer": "adamw_torch", "lr_scheduler": "constant", "learning_rate": 1e-3, "sequence_len": 128}
    common = {"base_model": "./model", "datasets": [data], **batches, **floats, **saving, **steps, **adapter}
    common["chat_template"] = "tokenizer_default"
    plugins = {"theirs": "plugins.LoadsOnCpu", "ours": "streamshard.integrations.axolotl.StreamShardPlugin"}
    logs = {}
    for name, plugin in plugins.items():
        own: dict[str, Any] = {
            "output_dir": name,
            "plugins": ["plugins.Seeds", plugin],
            "chat_template": "tokenizer_default",
        }
        own |= {"streamshard": {"weight_slots": 3}} if name == "ours" else {}
        (tmp_path / f"{name}.yaml").write_text(json.dumps({**common, **own}))
        _start(tmp_path, "-m", "axolotl.cli.train", f"{name}.yaml", ACCELERATE_USE_CPU="true")
        logs[name] = json.loads((tmp_path / name / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    _assert_logs_equal(logs["ours"], logs["theirs"], steps=3)
    for where in ("", "checkpoint-3"):
        names = [{file.name for file in (tmp_path / name / where).iterdir()} for name in plugins]
        assert names[0] == names[1]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["full", "lora", "dpo"])
def test_ms_swift_logs_what_it_logs_with_ddp(kind: str, tmp_path: Path) -> None:
    _need("swift", "ms-swift 4.6.0")
    _make_run(tmp_path)
    (tmp_path / "plugin.py").write_text(
        "from streamshard.integrations.ms_swift import shard_trainers\nshard_trainers(weight_slots=3)\n"
    )
    rows = _read_lines(tmp_path / "chat.jsonl")
    refused = [{**row, "rejected_response": " ".join(["w1"] * 5)} for row in rows]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in refused))
    command = ["-m", "swift.cli.rlhf", "--rlhf_type", "dpo"] if kind == "dpo" else ["-m", "swift.cli.sft"]
    data = tmp_path / ("pairs.jsonl" if kind == "dpo" else "chat.jsonl")
    tuner = "lora" if kind == "lora" else "full"
    options = f"""
        --model {tmp_path}/model --model_type llama --template default --dataset {data} --tuner_type {tuner}
        --torch_dtype float32 --use_cpu true --bf16 false --fp16 false --attn_impl eager --learning_rate 1e-3
        --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --max_steps 3 --save_steps 3 --logging_steps 1
        --add_version false --report_to none --check_model false --dataset_num_proc 1"""
    for name, plugin in {"theirs": [], "ours": ["--external_plugins", "plugin.py"]}.items():
        _start(tmp_path, *command, *options.split(), "--output_dir", name, *plugin)
    logs = [_read_lines(tmp_path / name / "logging.jsonl") for name in ("ours", "theirs")]
    _assert_logs_equal(logs[0], logs[1], steps=3)
    names = [{file.name for file in (tmp_path / name / "checkpoint-3").iterdir()} for name in ("ours", "theirs")]
    assert names[0] == names[1]


@pytest.mark.timeout(400)
def test_llamafactory_logs_what_it_logs_with_ddp(tmp_path: Path) -> None:
    _need("llamafactory", "0.9.5")
    _make_run(tmp_path)
    # Without an accelerator LLaMA-Factory cannot synchronise with it after each step.
    (tmp_path / "on_cpu.py").write_text(
        "import runpy, sys, torch\ntorch.accelerator.synchronize = lambda: None\n"
        "del sys.argv[0]\nrunpy.run_module(sys.argv[0], run_name='__main__')\n"
    )
    batches = {"micro_batch_size": 2, "global_batch_size": 8, "max_steps": 4, "cutoff_len": 128, "batching_workers": 0}
    common = {"model": str(tmp_path / "model"), "template": "chatml", "train_dataset": str(tmp_path / "data.yaml")}
    common |= {**batches, "learning_rate": 1e-3, "bf16": False, "enable_activation_checkpointing": False}
    common |= {"flash_attn": "eager", "save_steps": 2}
    ours = {"dist_config": {"name": "fsdp2", "weight_slots": 3}}
    configs = {"theirs": {}, "ours": ours, "resumed": {**ours, "resume_from_checkpoint": "ours/checkpoint-2"}}
    modules = ["llamafactory.v1.launcher", *["streamshard.integrations.llamafactory"] * 2]
    for module, (name, own) in zip(modules, configs.items(), strict=True):
        (tmp_path / f"{name}.yaml").write_text(json.dumps({**common, **own, "output_dir": name}))
        _start(tmp_path, "on_cpu.py", module, "sft", f"{name}.yaml")
        if name == "ours":
            shutil.copy(tmp_path / name / "trainer_log.jsonl", tmp_path / "ours.jsonl")
    logs = {name: _read_lines(tmp_path / name / "trainer_log.jsonl") for name in configs}
    _assert_logs_equal(logs["ours"], logs["theirs"], steps=4)
    _assert_logs_equal(logs["resumed"], logs["theirs"][2:], steps=2)
    names = [{file.name for file in (tmp_path / name).iterdir()} for name in configs]
    assert names[0] == names[1]

"""axolotl, ms-swift, LLaMA-Factory: with StreamShard each trains as with DistributedDataParallel.

Stand-ins take the frameworks' places, whose packages do not go with those of other tests.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from streamshard.errors import ConfigError
from tests.compare import assert_same, full_weights
from tests.counts import engine_inside
from tests.integrations.accelerating import on_ranks
from tests.integrations.models import make_model, make_rows, make_tokenizer
from tests.integrations.trainers import assert_equal, launched, train
from tests.ranks import RankContext


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


def _assert_trains_as_ddp(sharded: Any, tmp_path: Path, **options: Any) -> Any:
    """Train with a class of ours and with `Trainer`, compare, and return our trainer's model, which keeps its slots."""
    from transformers import Trainer

    theirs, ours = (
        train(each, make_model("llama"), tmp_path / name, make_rows("llama"), **options)
        for each, name in ((Trainer, "theirs"), (sharded, "ours"))
    )
    assert_equal(ours, theirs)
    assert engine_inside(ours.trainer.model).plan.keeps_weights
    return ours.trainer.model


@on_ranks(2)
def test_axolotls_plugin_trains_as_ddp_and_saves_when_rank_0_alone_saves(context: RankContext, tmp_path: Path) -> None:
    pytest.importorskip("pydantic", reason="needs pydantic")
    from transformers import Trainer

    base, trainers = {"BasePlugin": object}, {"AxolotlTrainer": Trainer}
    names = {"axolotl__integrations__base": base, "axolotl__core__trainers": trainers}
    ours, stand_ins = _with_stand_ins("streamshard.integrations.axolotl", **names)
    plugin = ours.StreamShardPlugin()
    config = _Config(streamshard={"weight_slots": "all"}, output_dir=str(tmp_path / "out"))
    assert plugin.load_datasets(config) is None
    assert config.device_map == {"": "cpu"} and config.experimental_skip_move_to_device
    with mock.patch.dict(sys.modules, stand_ins):
        sharded = plugin.get_trainer_cls(config)
        with pytest.raises(ConfigError, match="rl: dpo does not go with StreamShardPlugin"):
            plugin.get_trainer_cls(_Config(rl="dpo"))
    with launched(context):
        model = _assert_trains_as_ddp(sharded, tmp_path)
        plugin.post_train(config, model)
        if context.rank == 0:  # as axolotl does
            model.save_pretrained(config.output_dir)
        plugin.post_train(config, model)
    saved = type(make_model("llama")).from_pretrained(config.output_dir)
    assert_same(saved.state_dict(), full_weights(model), "saved weights")


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
    with launched(context):
        _assert_trains_as_ddp(sharded, tmp_path, save_strategy="steps", save_steps=2)
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
def test_llamafactorys_backend_trains_as_ddp_and_continues(context: RankContext, mode: str, tmp_path: Path) -> None:
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
    assert engine_inside(model).plan.keeps_weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.testing.assert_close(_steps(model, optimizer, context.rank, 4), wanted, rtol=1e-4, atol=1e-6)
    assert_same(full_weights(model), whole.module.state_dict(), "weights")

    options = {"processor": make_tokenizer(), "save_ckpt_as_hf": True}
    StreamShardBackend.save_checkpoint(model, optimizer, str(tmp_path / "checkpoint"), **options)
    files = {file.name for file in (tmp_path / "checkpoint" / "hf_model").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= files
    refused = make_model("llama")
    refused._init_mode = "init_on_rank0"
    with pytest.raises(ConfigError, match="take init_on_meta"):
        StreamShardBackend.shard_model(refused, {"name": "fsdp2"})
    other = make()
    resumed = torch.optim.AdamW(other.parameters(), lr=1e-2)
    StreamShardBackend.load_checkpoint(other, resumed, str(tmp_path / "checkpoint"))
    assert _steps(other, resumed, context.rank, 2) == _steps(model, optimizer, context.rank, 2)


def test_llamafactorys_registry_gets_the_backend() -> None:
    """Of 0.9.5 (``hub``), and of later versions."""
    registry: dict[Any, Any] = {}

    class DistributedPlugin:
        def __init__(self, name: str) -> None:
            self.name = name

        def register(self, *method: str) -> Any:
            return lambda made: registry.update({(self.name, *method): made})

    for module in ("interface", "hub"):
        registry.clear()
        name = f"llamafactory__v1__plugins__trainer_plugins__distributed__{module}"
        contents = {name: {"DistributedPlugin": DistributedPlugin}}
        ours, stand_ins = _with_stand_ins("streamshard.integrations.llamafactory", **contents)
        with mock.patch.dict(sys.modules, stand_ins):
            ours.register()
        backend, methods = ours.StreamShardBackend, ("save_model", "save_checkpoint", "load_checkpoint")
        wanted = {("fsdp2",): backend.shard_model, **{("fsdp2", each): getattr(backend, each) for each in methods}}
        if module == "interface":
            wanted = {("fsdp2",): backend}
        assert registry == wanted

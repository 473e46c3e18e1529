"""accelerate: whole weights, and runs that are saved and gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import load_checkpoint_in_model
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration

from streamshard import CheckpointError, ConfigError, Precision, ShardingError, StreamShard
from streamshard.integrations.accelerate import StreamShardAccelerator
from tests.compare import assert_same
from tests.integrations.accelerating import SAMPLES, Trained, launched, loader, make_model, on_ranks, stock
from tests.ranks import RankContext, RankPool

FP32 = Precision(param_dtype=torch.float32)


@on_ranks(2)
def test_whole_weights_in_memory_and_in_files(context: RankContext, tmp_path: Path) -> None:
    with launched(context):
        run = Trained(StreamShardAccelerator, steps=2)
        accelerator = run.accelerator
        whole = run.weights()
        accelerator.save_model(run.model, tmp_path / "several", max_shard_size="2KB")
        assert (tmp_path / "several" / "model.safetensors.index.json").exists()
        accelerator.save_model(run.model, tmp_path / "one")
        accelerator.save_model(run.model, tmp_path / "pickled", safe_serialization=False)
        accelerator.wait_for_everyone()
        for where in ("several", "one", "pickled"):
            other = make_model(seed=99)
            load_checkpoint_in_model(other, tmp_path / where)
            assert_same(other.state_dict(), whole, where)


@on_ranks(2)
def test_accelerates_own_class_raises_instead_of_saving_pieces(context: RankContext, tmp_path: Path) -> None:
    """The rank that would write them raises."""
    with launched(context):
        accelerator = stock()
        model = StreamShard(make_model(), precision=FP32)
        with pytest.raises(ShardingError, match="StreamShardAccelerator"):
            accelerator.prepare(model)
        with pytest.raises(ShardingError, match=r"all_reduce\(\) of parameter"):  # as accelerate's LocalSGD
            accelerator.reduce([param.data for param in model.parameters()])
        accelerator._models.clear()
        model = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        for safe in (True, False) if context.rank == 0 else ():
            with pytest.raises(ShardingError, match="full_state_dict|summon_full_params"):
                accelerator.save_model(model, tmp_path, "1GB", safe)


@on_ranks(2)
@pytest.mark.parametrize("is_stateful", [False, True])
def test_a_run_goes_on_within_an_epoch(context: RankContext, tmp_path: Path, is_stateful: bool) -> None:
    """With the batches and random numbers that were left, as they would have come.

    Also from what is saved right after it was loaded.
    """
    config = DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=is_stateful)
    settings: dict[str, Any] = {"dataloader_config": config}
    with launched(context):
        run = Trained(StreamShardAccelerator, **settings)
        run.epoch()
        for number, (x, y) in enumerate(run.data, 1):
            run.step(x, y)
            if number == 4:
                run.accelerator.save_state(tmp_path)
                run.losses.clear()
        run.epoch()
    for where in (tmp_path, tmp_path / "again"):
        with launched(context):
            other = Trained(StreamShardAccelerator, **settings)
            other.epoch(1)  # nothing of it must be left
            other.accelerator.load_state(where)
            if where == tmp_path:
                other.accelerator.save_state(tmp_path / "again")
            other.losses.clear()
            other.epoch(data=None if is_stateful else other.accelerator.skip_first_batches(other.data, 4))
            other.data.set_epoch(2)  # as accelerate's own example does
            other.epoch()
            assert other.losses == run.losses
            assert_same(other.weights(), run.weights(), "weights")


@on_ranks(2)
def test_checkpoints_are_numbered_and_only_the_latest_kept(context: RankContext, tmp_path: Path) -> None:
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    with launched(context):
        run = Trained(StreamShardAccelerator, steps=1, project_config=project)
        accelerator = run.accelerator
        with pytest.raises(CheckpointError, match="no whole checkpoint"):
            accelerator.load_state()
        for number in range(11):
            assert accelerator.save_state() == tmp_path / "checkpoints" / f"checkpoint-{number}"
        wanted = run.weights()
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint-10", "checkpoint-9"]
        assert accelerator.save_iteration == 11
        run.epoch(1)
        accelerator.load_state()
        assert_same(run.weights(), wanted, "weights")


@on_ranks(2)
def test_accelerates_state_hooks_are_refused_when_they_are_registered(context: RankContext) -> None:
    """Not at the first save, hours later: they would get models with pieces."""
    with launched(context):
        accelerator = StreamShardAccelerator()
        for register in (accelerator.register_save_state_pre_hook, accelerator.register_load_state_pre_hook):
            with pytest.raises(ConfigError, match="a hook of register_save_state_pre_hook or .* register_for_checkp"):
                register(print)


def _epoch(context: RankContext, directory: Path, epoch: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """One epoch of a run in `directory`, in steps of four micro-batches: norms and weights."""
    with launched(context):
        accelerator = StreamShardAccelerator(gradient_accumulation_steps=4 // context.world_size)
        model, norms = make_model(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, data = accelerator.prepare(model, optimizer, loader(batch_size=2, shuffle=False))
        counter: Any = torch.nn.BatchNorm1d(1)  # has a number in its state
        accelerator.register_for_checkpointing(counter)
        if epoch:
            accelerator.load_state(directory)
            assert (int(counter.num_batches_tracked), data.iteration) == (epoch, epoch)
        counter.num_batches_tracked += 1
        for x, y in data:
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - y).square().mean())
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.2)))
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(directory)
        return norms, accelerator.get_state_dict(model)


def test_epochs_on_other_numbers_of_processes_have_the_bits_of_one_process(ranks: RankPool, tmp_path: Path) -> None:
    for epoch, count in enumerate((4, 1, 2)):
        alone = ranks(1).run(_epoch, tmp_path / "alone", epoch)[0]
        others = ranks(count).run(_epoch, tmp_path / "others", epoch)[0]
        assert len(alone[0]) == SAMPLES // 8 and max(alone[0]) > 0.2
        assert others[0] == alone[0]
        assert [name for name, weight in alone[1].items() if not torch.equal(weight, others[1][name])] == []

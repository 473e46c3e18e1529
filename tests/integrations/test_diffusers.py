"""Models of diffusers: exports have its file names and config, and its `from_pretrained` loads them."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from streamshard import CheckpointError, ShardingError, StreamShard, export_safetensors, load_safetensors
from streamshard.integrations.accelerate import StreamShardAccelerator
from tests.compare import EXACT, ROUNDING, assert_same, full_weights
from tests.integrations.accelerating import launched
from tests.integrations.models import unet
from tests.ranks import RankContext, on_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    diffusers: Any = pytest.importorskip("diffusers", reason="needs diffusers")
    pytest.importorskip("diffusers.training_utils")


@on_ranks(2)
def test_an_export_has_the_files_of_save_pretrained(context: RankContext, tmp_path: Path) -> None:
    """The same names, tensors and config; `load_safetensors` reads them back. Errors say what else to do."""
    max_shard_size = "40KB"
    plain = unet()
    if context.rank == 0:
        plain.save_pretrained(tmp_path / "plain", max_shard_size=max_shard_size)
    model: Any = StreamShard(unet())
    model.save_pretrained(tmp_path / "own", max_shard_size=max_shard_size)
    export_safetensors(model, tmp_path / "export", max_shard_size=max_shard_size)
    if context.rank == 0:
        names = sorted(path.name for path in (tmp_path / "plain").iterdir())
        assert len(names) > 3
        for directory in (tmp_path / "own", tmp_path / "export"):
            assert sorted(path.name for path in directory.iterdir()) == names
            assert (directory / "config.json").read_text() == (tmp_path / "plain" / "config.json").read_text()
            loaded = diffusers.UNet2DModel.from_pretrained(directory)
            assert_same(loaded.state_dict(), plain.state_dict(), "read", EXACT)
    other: Any = StreamShard(unet().apply(lambda module: [nn.init.zeros_(p) for p in module.parameters()] and None))
    load_safetensors(other, tmp_path / "own")
    assert_same(full_weights(other), plain.state_dict(), "loaded", EXACT)
    with pytest.raises(CheckpointError, match="variant='fp16'.*Save without it, load the directory with"):
        model.save_pretrained(tmp_path / "model", variant="fp16")
    with pytest.raises(CheckpointError, match="push_to_hub"):
        model.push_to_hub("name/repository")


@on_ranks(2)
def test_an_ema_model_made_after_prepare_works_as_in_one_process(context: RankContext, tmp_path: Path) -> None:
    """diffusers' EMAModel: step, store, copy_to, restore, and its state in a checkpoint. Made before, it raises."""

    def train(model: Any, average: Any, place: int, places: int, backward: Any) -> None:
        optimizer, generator = torch.optim.SGD(model.parameters(), 1e-2), torch.Generator().manual_seed(1)
        for _ in range(3):
            images = torch.randn(4, 3, 8, 8, generator=generator).chunk(places)[place]
            backward((model(images, torch.zeros(len(images), dtype=torch.int64)).sample - images).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            average.step(model.parameters())

    whole = unet()
    wanted = diffusers.training_utils.EMAModel(whole.parameters(), decay=0.9)
    train(whole, wanted, 0, 1, lambda loss: loss.backward())
    wanted.copy_to(whole.parameters())
    with launched(context):
        accelerator = StreamShardAccelerator(precision="fp32")
        model: Any = unet()
        early = diffusers.training_utils.EMAModel(model.parameters(), decay=0.9)
        model = accelerator.prepare(model)
        with pytest.raises(ShardingError, match="make an average of weights after sharding"):
            early.step(model.parameters())
        average = diffusers.training_utils.EMAModel(model.parameters(), decay=0.9)
        accelerator.register_for_checkpointing(average)
        train(model, average, context.rank, 2, accelerator.backward)
        accelerator.save_state(tmp_path / "run")
        average.shadow_params = [torch.zeros_like(each) for each in average.shadow_params]
        accelerator.load_state(tmp_path / "run")
        average.store(model.parameters())
        average.copy_to(model.parameters())
        assert_same(full_weights(model), whole.state_dict(), "averages", ROUNDING)
        average.restore(model.parameters())


@on_ranks(2)
def test_adapters_are_saved_from_full_weights_that_all_ranks_have_gathered(context: RankContext) -> None:
    """As diffusers' LoRA scripts save them, on rank 0 alone. Without the full weights PEFT's function raises there."""
    peft = pytest.importorskip("peft", reason="needs peft")
    torch.manual_seed(0)
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    sizes = {"block_out_channels": (16,), "norm_num_groups": 8, "layers_per_block": 1, "cross_attention_dim": 8}
    plain = diffusers.UNet2DConditionModel(8, **blocks, **sizes, attention_head_dim=4)
    plain.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    wanted = {name: each.clone() for name, each in peft.get_peft_model_state_dict(plain).items()}
    with launched(context):
        accelerator = StreamShardAccelerator(precision="fp32")
        model = accelerator.prepare(plain)
        weights = accelerator.get_state_dict(model)
        if context.rank == 0:
            with pytest.raises(ShardingError, match="Call on all ranks instead.*full_state_dict"):
                torch.save(peft.get_peft_model_state_dict(model), io.BytesIO())
            found = peft.get_peft_model_state_dict(model, state_dict=weights)
            assert wanted
            assert_same(found, wanted, "adapters", EXACT)

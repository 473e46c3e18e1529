"""Exports equal what `save_pretrained` writes, from one rank or several, and load again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, load_model
from torch import nn

from streamshard import StreamShard, export_safetensors
from streamshard.errors import CheckpointError, ConfigError, ShardingError
from tests.checkpoint.exporting import MODELS, Plain, assert_same_files, filled, names_in, sharded, stored_bytes
from tests.families import gpt2, llama, mixtral, qwen3_vl_moe
from tests.ranks import RankContext, on_ranks
from tests.reference import assert_same

# ------------------------------------------------------------------------------------------------ what is written


@on_ranks(2)
def test_experts_are_split_by_their_own_size(context: RankContext, tmp_path: Path) -> None:
    """`save_pretrained` counts a layer's experts as one and exceeds max_shard_size; we hold it, with equal tensors."""
    files = export_safetensors(StreamShard(filled(mixtral)), tmp_path / "ours", max_shard_size="3KB")
    if context.rank > 0:
        return
    model = filled(mixtral)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="3KB")
    assert stored_bytes(tmp_path / "ours") == stored_bytes(tmp_path / "theirs")
    sizes = [sum(tensor.nbytes for tensor in load_file(tmp_path / "ours" / name).values()) for name in files[:-1]]
    alone = [len(load_file(tmp_path / "ours" / name)) == 1 for name in files[:-1]]
    assert all(size <= 3000 or single for size, single in zip(sizes, alone, strict=True))
    index = json.loads((tmp_path / "ours" / files[-1]).read_text())
    assert index["metadata"] == {"total_parameters": model.num_parameters(), "total_size": sum(sizes)}


@on_ranks(2)
def test_dtype_argument_converts_weights_and_config(context: RankContext, tmp_path: Path) -> None:
    """Every way of saying it equals ``model.to(dtype).save_pretrained``, and the model keeps its own config."""
    model: Any = StreamShard(filled(gpt2))
    if context.rank == 0:
        filled(gpt2, torch.bfloat16).save_pretrained(tmp_path / "theirs")
    for number, dtype in enumerate((torch.bfloat16, "bfloat16", "torch.bfloat16")):
        export_safetensors(model, tmp_path / str(number), dtype=dtype)
        assert model.config.architectures is None
        if context.rank == 0:
            assert_same_files(tmp_path / str(number), tmp_path / "theirs")


@on_ranks(1)
def test_dtype_that_is_no_floating_dtype_raises(context: RankContext, tmp_path: Path) -> None:
    """The message repeats what was given; nothing is written."""
    model = sharded(filled(Plain))
    dtypes: list[Any] = ["bf16x", "int8", torch.int8, 16]
    for dtype in dtypes:
        with pytest.raises(ConfigError, match="wanted a floating-point torch.dtype"):
            export_safetensors(model, tmp_path / "out", dtype=dtype)
    assert not (tmp_path / "out").exists()


@on_ranks(2)
def test_plain_model_keeps_first_tied_name_and_persistent_buffers(context: RankContext, tmp_path: Path) -> None:
    """safetensors' own `load_model` accepts the file, integers stay integers and no config appears."""
    assert export_safetensors(sharded(filled(Plain)), tmp_path, dtype="float16") == ["model.safetensors"]
    assert names_in(tmp_path) == ["model.safetensors"]
    model, stored = filled(Plain), load_file(tmp_path / "model.safetensors")
    assert set(stored) == set(model.state_dict()) - {"last.weight"}
    for name, tensor in stored.items():
        want = model.state_dict()[name]
        assert torch.equal(tensor, want.half() if want.is_floating_point() else want), name
    other: Any = Plain().half()
    load_model(other, tmp_path / "model.safetensors")
    assert torch.equal(other.last.weight, model.first.weight.half())


@on_ranks(2)
def test_weights_tied_without_being_declared_are_all_written(context: RankContext, tmp_path: Path) -> None:
    """`from_pretrained` would not tie them again, so each name has its values in the file."""
    model = filled(llama)
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    export_safetensors(StreamShard(model), tmp_path)
    restored = transformers.LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, tensor in wanted.items():
        assert torch.equal(restored[name], tensor), name


@on_ranks(1)
def test_model_with_adapters_is_refused(context: RankContext, tmp_path: Path) -> None:
    """`save_pretrained` would save the adapters only. Whether transformers or PEFT itself has put them there."""
    marked, adapted = llama(), llama()
    marked._hf_peft_config_loaded = True
    adapted.model.extra = type("Layer", (nn.Module,), {"__module__": "peft.tuners.lora.layer"})()
    for model, where in ((marked, ""), (adapted, r".'model.extra'")):
        with pytest.raises(CheckpointError, match=f"has adapters of PEFT.*{where}"):
            export_safetensors(StreamShard(model), tmp_path)


# ------------------------------------------------------------------------------------------------ sharded models


@on_ranks(2)
@pytest.mark.parametrize("make", [*MODELS, qwen3_vl_moe])
def test_sharded_model_exports_what_save_pretrained_writes(
    context: RankContext, make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """The class made by sharding, its pieces and its ranks change nothing in the files."""
    model = filled(make)
    size = "5GB" if make in (mixtral, qwen3_vl_moe) else "3KB"
    if context.rank == 0:
        model.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    export_safetensors(StreamShard(model), tmp_path / "ours", max_shard_size=size)
    if context.rank == 0:
        assert_same_files(tmp_path / "ours", tmp_path / "theirs")


# ------------------------------------------------------------------------------------------------ transformers' methods


@on_ranks(2)
def test_save_pretrained_of_a_sharded_model_exports_it(context: RankContext, tmp_path: Path) -> None:
    """Called on all ranks. Full weights that are given are written by the rank that calls it."""
    plain = filled(llama, torch.bfloat16)
    model: Any = StreamShard(filled(llama, torch.bfloat16))
    if context.rank == 0:
        plain.save_pretrained(tmp_path / "theirs")
        plain.save_pretrained(tmp_path / "several", max_shard_size="3KB")
    model.save_pretrained(tmp_path / "ours", is_main_process=context.rank == 0, safe_serialization=True)
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")
    model.save_pretrained(tmp_path / "ours in several", max_shard_size="3KB")
    assert_same_files(tmp_path / "ours in several", tmp_path / "several")
    whole = model.full_state_dict()
    if context.rank == 0:
        model.save_pretrained(tmp_path / "given", variant="fp32", state_dict=dict(whole))
        written = load_file(tmp_path / "given" / "model.fp32.safetensors")
        assert_same(written, {key: whole[key] for key in written}, "given")


@on_ranks(2)
def test_what_save_pretrained_of_a_sharded_model_cannot_do_raises(context: RankContext, tmp_path: Path) -> None:
    model: Any = StreamShard(llama())
    with pytest.raises(CheckpointError, match=r"variant='fp16'.*full_state_dict.*state_dict=weights, variant="):
        model.save_pretrained(tmp_path, variant="fp16")
    with pytest.raises(CheckpointError, match=r"push_to_hub=True.*state_dict=weights"):
        model.save_pretrained(tmp_path, context.rank == 0, None, True)
    with pytest.raises(
        CheckpointError, match=r"save_pretrained\(directory\) on all ranks.*upload_folder\(repo_id='me/it'"
    ):
        model.push_to_hub("me/it")
    around: Any = StreamShard(nn.Sequential(llama()))
    with pytest.raises(ShardingError, match="is inside a sharded model"):
        around[0].save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())

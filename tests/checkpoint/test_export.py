"""Exports equal what `save_pretrained` writes, from one rank or several, load again, and leave nothing if they fail."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, load_model
from torch import nn

from streamshard import StreamShard, export_safetensors, load_safetensors
from streamshard.checkpoint import local_directory, storage
from streamshard.checkpoint.disk_layout import Rearrangement
from streamshard.errors import CheckpointError, ConfigError, ShardingError
from tests.checkpoint.exporting import MODELS, Plain, assert_same_files, filled, names_in, sharded, stored_bytes
from tests.compare import EXACT, assert_same, full_weights
from tests.families import gpt2, llama, mixtral, qwen3_vl_moe
from tests.ranks import RankContext, on_ranks
from tests.test_big_models import sampling_peak


@on_ranks(2)
def test_experts_are_split_by_their_own_size(context: RankContext, tmp_path: Path) -> None:
    """`save_pretrained` counts a layer's experts as one and exceeds max_shard_size; we hold it, with equal tensors.

    They load from several files, and from the other layout that transformers can write.
    """
    ours, model = tmp_path / "ours", filled(mixtral)
    files = export_safetensors(StreamShard(filled(mixtral)), ours, max_shard_size="3KB")
    if context.rank == 0:
        model.save_pretrained(tmp_path / "theirs", max_shard_size="3KB")
        model.save_pretrained(tmp_path / "stacked", max_shard_size="3KB", save_original_format=False)
        assert stored_bytes(ours) == stored_bytes(tmp_path / "theirs")
        stored = [load_file(ours / name) for name in files[:-1]]
        sizes = [sum(tensor.nbytes for tensor in each.values()) for each in stored]
        assert all(size <= 3000 or len(each) == 1 for size, each in zip(sizes, stored, strict=True))
        index = json.loads((ours / files[-1]).read_text())
        assert index["metadata"] == {"total_parameters": model.num_parameters(), "total_size": sum(sizes)}
    dist.barrier()
    for directory in (ours, tmp_path / "stacked"):
        loaded = sharded(mixtral())
        load_safetensors(loaded, directory)
        assert_same(full_weights(loaded), model.state_dict(), "loaded", EXACT)


@on_ranks(2)
def test_dtype_argument_converts_weights_and_config(context: RankContext, tmp_path: Path) -> None:
    """Every way of saying it equals ``model.to(dtype).save_pretrained``, and the model keeps its own config.

    A dtype that is no floating dtype raises, and nothing is written.
    """
    model: Any = StreamShard(filled(gpt2))
    if context.rank == 0:
        filled(gpt2, torch.bfloat16).save_pretrained(tmp_path / "theirs")
    for number, dtype in enumerate((torch.bfloat16, "bfloat16", "torch.bfloat16")):
        export_safetensors(model, tmp_path / str(number), dtype=dtype)
        assert model.config.architectures is None
        if context.rank == 0:
            assert_same_files(tmp_path / str(number), tmp_path / "theirs")
    others: list[Any] = ["bf16x", "int8", torch.int8, 16]
    for dtype in others:
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


@on_ranks(2)
@pytest.mark.parametrize("make", [*MODELS, qwen3_vl_moe])
def test_an_export_is_what_save_pretrained_writes(context: RankContext, make: Any, tmp_path: Path) -> None:
    """The class made by sharding, its pieces and its ranks change nothing in the files."""
    model, wanted = filled(make), filled(make)
    size = "5GB" if "num_experts" in str(model.config) else "3KB"
    if context.rank == 0:
        model.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    export_safetensors(StreamShard(model), tmp_path / "ours", max_shard_size=size)
    if context.rank == 0:
        assert_same_files(tmp_path / "ours", tmp_path / "theirs")
    loaded = sharded(make())
    load_safetensors(loaded, tmp_path / "ours")
    assert_same(full_weights(loaded), wanted.state_dict(), "loaded", EXACT)


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
    for call, told in (
        (
            lambda: model.save_pretrained(tmp_path, variant="fp16"),
            r"variant='fp16'.*full_state_dict.*weights, variant=",
        ),
        (lambda: model.save_pretrained(tmp_path, False, None, True), r"push_to_hub=True.*state_dict=weights"),
        (lambda: model.push_to_hub("me/it"), r"save_pretrained\(directory\) on all ranks.*repo_id='me/it'"),
    ):
        with pytest.raises(CheckpointError, match=told):
            call()
    around: Any = StreamShard(nn.Sequential(llama()))
    with pytest.raises(ShardingError, match="is inside a sharded model"):
        around[0].save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@on_ranks(1)
def test_export_needs_one_chunk_of_memory(context: RankContext, tmp_path: Path) -> None:
    """Exporting 64 MiB in another dtype raises the memory of the process by less than three chunks."""
    model, small = (StreamShard(nn.Sequential(nn.Linear(numel // 2, 2, bias=False)), ["0"]) for numel in (16 << 20, 4))
    export_safetensors(small, tmp_path, dtype=torch.bfloat16)  # what the first call loads is not what is measured
    with sampling_peak() as peak:
        before = peak[0]
        export_safetensors(model, tmp_path, dtype=torch.bfloat16)
    assert peak[0] - before <= 3 * storage.CHUNK_BYTES
    assert (tmp_path / "model.safetensors").stat().st_size > 2 * (16 << 20)


@on_ranks(2)
@pytest.mark.parametrize(("rank", "call"), [(1, "pwrite"), (1, "fsync"), (0, "replace")])
def test_failure_on_one_rank_is_raised_on_all(context: RankContext, rank: int, call: str, tmp_path: Path) -> None:
    """Every rank's error names the rank that failed and the cause, and no file is left."""
    model = StreamShard(filled(llama))
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if context.rank == rank else None
    failing = mock.Mock(wraps=getattr(os, call), side_effect=error)
    with mock.patch.object(os, call, failing), pytest.raises(CheckpointError, match=f"rank {rank}: .*No space left"):
        export_safetensors(model, tmp_path, max_shard_size="3KB")
    assert not [name for name in names_in(tmp_path) if name.endswith((".partial", "index.json", "model.safetensors"))]


@on_ranks(2)
def test_directory_that_other_ranks_do_not_see_is_named(context: RankContext, tmp_path: Path) -> None:
    """Each host has a disk of its own: the message says that the directory must be shared."""
    (tmp_path / "of rank 0").mkdir(exist_ok=True)

    def seen(self: local_directory.LocalDirectory, path: Path) -> None:
        self.path = Path(str(path).replace("of rank 0", f"of rank {context.rank}"))

    refused = pytest.raises(CheckpointError, match="rank 1: .*must be on storage all ranks share")
    with mock.patch.object(local_directory.LocalDirectory, "__init__", seen), refused:
        export_safetensors(sharded(filled(Plain)), tmp_path / "of rank 0")
    assert names_in(tmp_path / "of rank 0") == []


def _rearranged(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
    """Experts' gates and up-projections apart, fused, and interleaved: [3, 8, 5], [4, 5], [6, 5]."""
    gate, up = a.chunk(2, dim=1)
    experts = [part.squeeze(0) for part in (*gate.contiguous().chunk(3, dim=0), *up.contiguous().chunk(3, dim=0))]
    fused = [torch.cat([b, c], dim=0), torch.cat([b, c[:4]], dim=-1), torch.stack([b, c[:4]], dim=1)]
    swapped = a.reshape(3, 2, 4, 5).transpose(1, 2).reshape(3, 8, 5)
    return [*experts, *fused, swapped, swapped[1:, 2:6], b.t().contiguous().view(2, 2, 5)]


def test_runs_say_where_every_element_comes_from() -> None:
    """Moving elements as shapes say gives what the operations give on values."""
    shapes = {"a": (3, 8, 5), "b": (4, 5), "c": (6, 5)}
    numbers = torch.randperm(3 * 8 * 5 + 4 * 5 + 6 * 5).split([120, 20, 30])
    values = {name: flat.view(shape) for (name, shape), flat in zip(shapes.items(), numbers, strict=True)}
    metas = {name: torch.empty(shape, dtype=torch.int64, device="meta") for name, shape in shapes.items()}
    with Rearrangement(metas) as followed:
        results = _rearranged(**metas)
    for want, result in zip(_rearranged(**values), results, strict=True):
        got = torch.full((want.numel(),), -1)
        for run in followed.runs("x", result):
            source = values[run.source].reshape(-1)
            got[run.start : run.start + run.numel] = source[run.source_start : run.source_start + run.numel]
        assert torch.equal(got, want.reshape(-1))


def test_computed_values_and_moves_of_single_elements_are_refused() -> None:
    """By the tensor's name. A large transposition would be millions of writes of two bytes."""
    source, large = torch.empty(4, 4, device="meta"), torch.empty(1024, 1024, device="meta")
    with Rearrangement({"a": source, "b": large}) as followed:
        results = {"sum": source + 1, "cast": source.half(), "mixed": torch.cat([source, source.double()])}
        turned = large.t().contiguous()
    for name, result in results.items():
        with pytest.raises(CheckpointError, match=f"saving '{name}' computes new values"):
            followed.runs(name, result)
    with pytest.raises(CheckpointError, match="move its elements one by one"):
        followed.runs("x", turned)

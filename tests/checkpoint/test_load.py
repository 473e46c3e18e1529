"""Loading reads what was exported, and refuses what does not fit."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from streamshard import export_safetensors, load_safetensors
from streamshard.checkpoint import export as loading
from streamshard.errors import CheckpointError
from tests.checkpoint.exporting import Plain, filled, sharded
from tests.compare import EXACT, assert_same, full_weights
from tests.families import bert, llama, mixtral
from tests.ranks import RankContext, on_ranks


def _write(context: RankContext, tensors: dict[str, torch.Tensor], directory: Path) -> Path:
    """By the first rank."""
    if context.rank == 0:
        directory.mkdir(exist_ok=True)
        copies = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        save_file(copies, directory / "model.safetensors", {"format": "pt"})
    dist.barrier()
    return directory


def _loaded(model: nn.Module, directory: Path) -> dict[str, torch.Tensor]:
    """Whole parameters and buffers, after `directory` was loaded into `model` on these ranks."""
    model = sharded(model)
    load_safetensors(model, directory)
    return full_weights(model)


def _assert_refused(model: nn.Module, directory: Path, *words: str) -> None:
    """On this rank, and no weight has changed."""
    model = sharded(model)
    before = full_weights(model)
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(model, directory)
    assert all(each in str(caught.value) for each in words), caught.value
    assert_same(full_weights(model), before, "weights", EXACT)


@on_ranks(2)
def test_load_converts_and_fills_buffers(context: RankContext, tmp_path: Path) -> None:
    """A 16-bit file fills fp32 main weights; buffers arrive whole, also where they are not contiguous."""
    model = filled(Plain)
    model.counts.copy_(torch.randint(100, (3, 2)))
    model.norm.running_mean.copy_(torch.randn(7))
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    export_safetensors(sharded(model), tmp_path, dtype="bfloat16")
    whole = _loaded(Plain(), tmp_path)
    assert torch.equal(whole["counts"], wanted["counts"])
    for name in ("last.weight", "scale", "norm.running_mean"):
        assert torch.equal(whole[name], wanted[name].bfloat16().float())
    weight = wanted.pop("first.weight")  # another tool may have kept another name of a tied parameter
    assert torch.equal(_loaded(Plain(), _write(context, wanted, tmp_path / "other"))["first.weight"], weight)


@on_ranks(2)
def test_load_names_what_does_not_fit_and_changes_nothing(context: RankContext, tmp_path: Path) -> None:
    """Missing, unexpected, of another shape, of another kind: each is named, on every rank."""
    tensors = filled(Plain).state_dict()
    del tensors["scale"]
    tensors["stray"] = torch.zeros(2)
    tensors["first.bias"] = torch.zeros(3)
    tensors["last.bias"] = torch.zeros(7, dtype=torch.int8)
    told = "does not fit Plain: missing scale; unexpected stray; mismatched first.bias (is [3], "
    other = "last.bias (is torch.int8, wanted torch.float32)"
    _assert_refused(Plain(), _write(context, tensors, tmp_path), told, other)


@on_ranks(1)
def test_commands_in_a_file_do_not_reach_the_terminal(context: RankContext, tmp_path: Path) -> None:
    """Neither in the error nor in its traceback."""
    header = {"\x1b[2K\n": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(CheckpointError, match=r"\\x1b\[2K\\n") as caught:
        load_safetensors(sharded(Plain()), tmp_path)
    assert str(caught.value).isprintable()
    assert all(line.isprintable() for line in "".join(traceback.format_exception(caught.value)).splitlines())
    assert caught.value.unexpected == ["\x1b[2K\n"]


@on_ranks(2)
def test_names_of_older_files_are_those_that_transformers_knows(context: RankContext, tmp_path: Path) -> None:
    """A norm's gamma and beta, and a table that was saved when every layer had one."""
    model = filled(bert)
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = dict(model.named_parameters())
    for new, old in names.items():
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    assert any("gamma" in name for name in tensors)
    whole = _loaded(bert(), _write(context, tensors, tmp_path / "old"))
    for name, param in model.named_parameters():
        assert torch.equal(whole[name], param), name
    tensors = {**filled(llama).state_dict(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    assert load_safetensors(sharded(llama()), _write(context, tensors, tmp_path / "table")) == ([], [], [])


@on_ranks(1)
@pytest.mark.parametrize("gives", [True, False])
def test_a_base_and_a_model_with_a_head_load_each_other(context: RankContext, gives: bool, tmp_path: Path) -> None:
    """The one's names begin with its place in the other. What the one does not have is left out, by name."""
    whole, base = filled(llama), filled(llama).model
    (whole if gives else base).save_pretrained(tmp_path)
    kind = "unexpected" if gives else "missing"
    taker = llama().model if gives else llama()
    _assert_refused(llama().model if gives else llama(), tmp_path, f": {kind} lm_head.weight. ")
    model = sharded(taker)
    head = None if gives else taker.lm_head.weight.detach().clone()
    left_out = load_safetensors(model, tmp_path, strict=False)
    assert left_out._asdict() == {"missing": [], "unexpected": [], "mismatched": [], kind: ["lm_head.weight"]}
    for name, weight in full_weights(model).items():
        wanted = head if name == "lm_head.weight" else base.get_parameter(name.removeprefix("model."))
        assert torch.equal(weight, wanted), name


@on_ranks(1)
def test_experts_of_which_one_is_missing_are_named(context: RankContext, tmp_path: Path) -> None:
    """And are left out altogether."""
    filled(mixtral).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
    tensors["model.layers.0.block_sparse_moe.experts.0.w2.weight"] = torch.zeros(3, 3)
    _write(context, tensors, tmp_path)
    named = "mismatched model.layers.0.mlp.experts.down_proj ", "layers.1.mlp.experts.gate"
    _assert_refused(mixtral(), tmp_path, *named)
    left_out = load_safetensors(sharded(mixtral()), tmp_path, strict=False)
    assert [len(names) for names in left_out] == [0, 0, 2]


@on_ranks(1)
def test_a_snapshot_of_the_hub_is_read_through_its_links(context: RankContext, tmp_path: Path) -> None:
    """Files are named by their contents, and linked to by the names that one looks for."""
    model = filled(llama)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    model.save_pretrained(blobs, max_shard_size="3KB")
    snapshot.mkdir(parents=True)
    for path in list(blobs.iterdir()):
        blob = path.rename(blobs / path.name[::-1].replace(".", ""))
        (snapshot / path.name).symlink_to(Path("..") / ".." / "blobs" / blob.name)
    assert torch.equal(_loaded(llama(), snapshot)["lm_head.weight"], model.lm_head.weight)


@on_ranks(2)
def test_different_copies_on_several_disks_raise(context: RankContext, tmp_path: Path) -> None:
    """On every rank, before anything changes."""
    copies = [tmp_path / "0", tmp_path / "1"]
    for number, copy in enumerate(copies):
        _write(context, {name: tensor + number for name, tensor in filled(Plain).state_dict().items()}, copy)
    _assert_refused(Plain(), copies[context.rank], "ranks see different files there")


@on_ranks(2)
def test_read_error_on_one_rank_is_raised_on_all(context: RankContext, tmp_path: Path) -> None:
    """All ranks raise, and the error says that weights have changed."""
    _write(context, filled(Plain).state_dict(), tmp_path)
    model = sharded(Plain())
    error = OSError("the disk is gone") if context.rank == 1 else None
    told = "the model holds some of its weights now: load again.*rank 1: OSError: the disk is gone"
    read = mock.Mock(wraps=loading.copy_ranges, side_effect=error)
    with mock.patch.object(loading, "copy_ranges", read), pytest.raises(CheckpointError, match=told):
        load_safetensors(model, tmp_path)

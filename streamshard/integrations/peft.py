"""Methods of Hugging Face's models that need full weights: ``save_pretrained``, ``push_to_hub``, merging of adapters.

``save_pretrained`` exports a transformers model: every rank writes its own bytes. Adapters (of a PeftModel or of
``add_adapter``) and models of sentence-transformers are saved by their library's own method, because only the library
knows the files. Rank 0 calls the method, while the parameters hold full tensors.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from streamshard.checkpoint.directory import write_together
from streamshard.checkpoint.export import export_safetensors
from streamshard.checkpoint.storage import parse_location
from streamshard.comm.ranks import raise_if, run_on_all_ranks
from streamshard.config import AnyPath, parse_path
from streamshard.core.module_state import engine_at_rest, engine_of, handle_of, not_a_layer
from streamshard.core.params import Param
from streamshard.errors import CheckpointError, ShardingError
from streamshard.full import gather_full, under_params
from streamshard.guards.modules import ShardedModule, change_class, original_class
from streamshard.integrations.huggingface import HuggingFace, is_from, is_model_of
from streamshard.planning.structure import modules_inside
from streamshard.torch_private import is_traced

_MADE = "made"  # inside a partial directory, which has a file of its own


def has_adapters(model: nn.Module) -> bool:
    """Whether ``save_pretrained`` saves adapters only: of a PeftModel, or after ``add_adapter``."""
    return is_model_of(model, "peft") or getattr(model, "_hf_peft_config_loaded", False)


class _Conventions(HuggingFace):
    """`HuggingFace`, with the methods of this module on the models."""

    def replace_methods(self, root: nn.Module) -> None:
        """Replace methods that need full weights, on the classes that StreamShard makes for the model's modules.

        A module inside a layer keeps its library's class, whose methods raise when they read pieces.
        """
        for module in modules_inside(root):
            if isinstance(module, ShardedModule):  # else its class is the library's own, for all models
                for name, method in _methods_of(module, is_root=module is root).items():
                    setattr(type(module), name, method)


CONVENTIONS = _Conventions()


def _methods_of(module: nn.Module, *, is_root: bool) -> dict[str, Any]:
    """Methods and properties for `module`, by name, in the place of its class's own."""
    methods: dict[str, Any] = {}
    if is_from(module, "peft") and hasattr(module, "merge_and_unload"):
        methods["merge_and_unload"] = _refuse_merge
    if is_from(module, "sentence_transformers") and hasattr(module, "save_pretrained"):  # parts of models lack it
        methods.update({name: functools.partialmethod(_save_itself, name) for name in ("save", "save_pretrained")})
        methods["push_to_hub"] = _push
    elif is_model_of(module, "transformers", "diffusers") or (is_root and is_model_of(module, "peft")):
        methods.update(save_pretrained=_save_pretrained, push_to_hub=_push)
    if is_model_of(module, "transformers") and hasattr(module, "generate"):
        # By this property transformers learns that `generate` has to go on until all ranks have finished.
        methods["_is_fsdp_managed_module"] = ShardedModule._is_fsdp_managed_module.getter(_generates_together)
    return methods


def save_on_first(
    model: nn.Module, directory: Path, save: Callable[[str], object], wanted: Collection[nn.Parameter] | None = None
) -> None:
    """Let rank 0 call `save` while its parameters hold full tensors, in CPU memory. Collective.

    Args:
        model: sharded; on rank 0 it is an unsharded model while `save` runs.
        directory: the destination. Its files are replaced one by one after `save` has returned.
        save: called with a new directory, and writes all files into it.
        wanted: the parameters that `save` reads, in their dtype before sharding; None: all.

    Raises:
        CheckpointError: on every rank; names the rank that failed.
    """

    def take(param: Param, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu", param.dtype, copy=True)  # `tensor` is a view of a whole flat parameter

    engine = engine_of(model)
    full, failure = gather_full(engine, take if engine.ranks.is_first else None, wanted)

    def write(partial: Path) -> None:
        raise_if(failure)
        if engine.ranks.is_first:
            (partial / _MADE).mkdir()
            if (directory / "README.md").exists():  # PEFT adds to the file
                shutil.copy(directory / "README.md", partial / _MADE)
            with under_params(engine, full), plain_classes(model):
                save(str(partial / _MADE))

    def publish(partial: Path, _: object) -> None:
        shutil.copytree(partial / _MADE, directory, copy_function=os.replace, dirs_exist_ok=True)

    write_together(engine.ranks, f"save to {directory}", directory, "model", write=write, publish=publish)


@contextlib.contextmanager
def plain_classes(model: nn.Module) -> Iterator[None]:
    """Inside, modules of a sharded model have their original classes, and so none of StreamShard's methods."""
    kinds = [(module, type(module)) for module in modules_inside(model) if isinstance(module, ShardedModule)]
    try:
        for module, kind in kinds:
            change_class(module, original_class(kind))
        yield
    finally:
        for module, kind in kinds:
            change_class(module, kind)


# -- methods of models --------------------------------------------------------------------------------------------


def _generates_together(self: Any) -> bool:
    """Whether all ranks of the default group have shards of the model: with them transformers' `generate` waits."""
    handle = handle_of(self)
    if handle is None or is_traced():  # torch.compile would look for attributes of FSDP
        return False
    return dist.is_initialized() and handle.engine.ranks.total_size == dist.get_world_size() > 1


def _save_pretrained(self: Any, save_directory: AnyPath, *args: Any, **given: Any) -> None:
    """``save_pretrained``, called on all ranks: `export_safetensors`, or adapters as PEFT saves them.

    With a ``state_dict=`` of full weights this is the library's method, on any rank.

    Raises:
        CheckpointError: as from `export_safetensors`; or an argument that only the library's method supports.
    """
    own = super(type(self), self).save_pretrained  # StreamShard has made the class: the library's is above it
    known = inspect.signature(own).parameters
    given |= dict(zip(list(known)[1:], args, strict=False))  # without the directory
    if given.get("state_dict") is not None:
        own(save_directory, **given)
        return
    engine = engine_at_rest(not_a_layer(self), "save_pretrained")
    given.pop("is_main_process", None)  # all ranks write
    if has_adapters(self):
        # On all ranks: `gather_full` wants the same parameters on each.
        wanted = run_on_all_ranks(engine.ranks, "find what PEFT saves", lambda: _wanted(self, given))
        save_on_first(self, parse_path("save_directory", save_directory), functools.partial(own, **given), wanted)
        return
    max_shard_size = given.pop("max_shard_size", known["max_shard_size"].default)  # 50GB, in diffusers 10GB
    for name in (name for name, value in given.items() if name in known and value != known[name].default):
        how = f"weights = model.full_state_dict() on all ranks, then on rank 0 (.., state_dict=weights, {name}=..)"
        if is_model_of(self, "diffusers"):
            how = "Save without it, load the directory with from_pretrained in one process, and save that model"
        raise CheckpointError(f"save_pretrained({name}={given[name]!r}) needs full weights: {how}")
    export_safetensors(self, parse_location("save_directory", save_directory), max_shard_size=max_shard_size)


def _save_itself(self: Any, name: str, path: AnyPath, *args: Any, **given: Any) -> None:
    """The library's method `name`, called on all ranks, runs on rank 0."""
    engine_at_rest(not_a_layer(self), name)
    own = getattr(super(type(self), self), name)
    save_on_first(self, Path(path), lambda directory: own(directory, *args, **given))


def _push(self: Any, repo_id: str, *_: Any, **__: Any) -> None:
    """``push_to_hub`` raises, because each rank would save into a directory of its own."""
    upload = f"huggingface_hub.upload_folder(repo_id={repo_id!r}, folder_path=directory)"
    raise CheckpointError(f"push_to_hub(): call model.save_pretrained(directory) on all ranks, and on rank 0 {upload}")


def _refuse_merge(self: Any, *_: Any, **__: Any) -> None:
    """``merge_and_unload`` raises: it would return a part of the sharded model, which no rank can save."""
    raise ShardingError(
        "merge_and_unload() of a sharded model: call model.save_pretrained(directory) on all ranks, and merge in one "
        "process, without sharding: PeftModel.from_pretrained(base, directory).merge_and_unload()"
    )


def _wanted(model: Any, given: Mapping[str, Any]) -> set[nn.Parameter]:
    """The parameters that PEFT reads to save adapters, and all parameters that train."""
    wanted = {param for param in model.parameters() if param.requires_grad}
    state = model.state_dict(keep_vars=True)
    save = importlib.import_module("peft").get_peft_model_state_dict
    for adapter in given.get("selected_adapters") or list(model.peft_config):
        if adapter in model.peft_config and not model.peft_config[adapter].is_prompt_learning:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PEFT warns again when it saves
                embeddings = given.get("save_embedding_layers", "auto")
                saved = save(model, dict(state), adapter_name=adapter, save_embedding_layers=embeddings)
            wanted.update(tensor for tensor in saved.values() if isinstance(tensor, nn.Parameter))
    return wanted

"""Functions on a sharded model that users call: weights in files, initial weights, the optimizer's full state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.checkpoint.disk_layout import Difference
from streamshard.checkpoint.export import export_shards, load_shards
from streamshard.checkpoint.optimizer_state import gather_state, scatter_state
from streamshard.checkpoint.storage import parse_location
from streamshard.config import AnyPath
from streamshard.core.engine import Engine
from streamshard.core.module_state import engine_at_rest, not_a_layer
from streamshard.core.optimizer_kinds import params_in
from streamshard.errors import ConfigError
from streamshard.guards.sharded_tensor import piece_of
from streamshard.initialise import Init, compute_buffers, initialise
from streamshard.optim.wrappers import engine_of_both
from streamshard.planning.structure import leave_inference_mode, leave_meta_device


def export_safetensors(
    model: nn.Module, directory: AnyPath, dtype: torch.dtype | str | None = None, max_shard_size: int | str = "5GB"
) -> list[str]:
    """Write the weights in the Hugging Face layout, all ranks at once. Call it on every rank, with the same arguments.

    Every rank writes its own bytes of each file, chunk by chunk (8 MiB); nothing is all-gathered. Tensors are equal,
    byte for byte, to those that `save_pretrained` of the same weights writes. For transformers models the config is
    saved too. An export over an earlier one is safe: at every moment, and after a kill, readers find the old weights or
    the new ones, complete.

    A PeftModel, or a model with ``add_adapter``, raises: ``model.save_pretrained(directory)`` writes its adapters.

    Args:
        model: a model made by `StreamShard`.
        directory: on storage that all ranks share; made if it is not there. Or a URL of object storage, without an
            export.
        dtype: dtype of floating-point weights in the files, such as ``torch.bfloat16`` or ``"bfloat16"``. None: each
            parameter's dtype before sharding.
        max_shard_size: the largest size of a file, such as ``"500MB"``; more weights are split over several files.

    Returns:
        The names of the safetensors files and of their index.

    Raises:
        ConfigError: `dtype` or `max_shard_size` cannot be read.
        CheckpointError: on every rank: the files cannot be written, the model's class stores its weights as other
            values than ranges of its parameters, or a module inside it has adapters.
        RankMismatchError: on every rank: `directory` differs between ranks. Nothing is written.
    """
    root = parse_location("directory", directory)
    engine = engine_at_rest(not_a_layer(model), "export_safetensors")
    return export_shards(model, engine, root, dtype, max_shard_size)


def load_safetensors(model: nn.Module, directory: AnyPath, *, strict: bool = True) -> Difference:
    """Load an export, or any safetensors directory in the Hugging Face layout. Call it on every rank.

    A rank reads the bytes it owns and converts them to fp32 chunk by chunk (8 MiB). The files must have exactly the
    names of the model's parameters and persistent buffers. For transformers' models tensors are converted as by
    ``from_pretrained``: renamed, merged or split, with or without the base model's prefix. Of several tied names one is
    enough; if the files have more, the first in the model's order is loaded.

    If the model was sharded on the meta device, its own initialisation computes buffers that no file has, such as
    rotary tables, as in `init_weights`.

    All ranks check each file before a weight changes. If storage fails afterwards, some weights are new and some are
    old, and the error says so.

    Args:
        model: a model made by `StreamShard`.
        directory: holds ``model.safetensors``, or numbered files and their index, or links to them (a snapshot of the
            hub), or a URL of object storage. Every rank must be able to read it, or a copy of it.
        strict: False: load the tensors that fit. Other parameters keep their values, or stay empty.

    Returns:
        The names that are ``missing``, ``unexpected`` or ``mismatched``; none if `strict`.

    Raises:
        CheckpointError: on every rank; names tensors that are missing, unexpected, or of another shape or kind, the
            file that cannot be read or is damaged, or the rank that sees other files.
    """
    root = parse_location("directory", directory)
    engine = engine_at_rest(not_a_layer(model), "load_safetensors", accepts_empty=True)
    with leave_inference_mode(), leave_meta_device():
        difference = load_shards(model, engine, root, strict=strict)
        compute_buffers(engine, model)
    return difference


def init_weights(model: nn.Module, init: Init | None = None, *, seed: int | None = None) -> None:
    """Fill empty parameters and buffers by the model's own initialisation. Call it on every rank.

    A tensor is empty if it was on the meta device when the model was sharded, and was not loaded since. Other tensors
    keep their values. The initialisation runs once for each unit. In each run the unit's weights are full tensors; all
    other weights are on the meta device, where writing does nothing and reading raises. The weights have the model's
    own distribution and are equal on any number of ranks. Other `units` give other random numbers.

    Args:
        model: made by `StreamShard`.
        init: called in each run with each module, children first, as by ``model.apply(init)``. None: calls
            ``initialize_weights`` of transformers' models, ``init_weights()`` of modules that have it without arguments
            (it must initialise all modules inside), and ``reset_parameters`` of other modules.
        seed: seed of torch's random numbers; None: ``torch.initial_seed()``. Rank 0's seed counts.

    Raises:
        ShardingError: names a module whose ``init_weights`` or ``_init_weights`` takes arguments, parameters and
            buffers that nothing fills, or a parameter that the initialisation has replaced. Then all stay empty.
    """
    engine = engine_at_rest(not_a_layer(model), "init_weights", accepts_empty=True)
    with leave_inference_mode(), leave_meta_device():
        initialise(engine, model, init, seed)


def full_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, rank0_only: bool = True) -> dict[str, Any]:
    """The full state of `optimizer`, as for the unsharded model, in CPU memory. Call it on every rank.

    Args:
        model: a model made by `StreamShard`.
        optimizer: an optimizer of the model's parameters, or some of them: elementwise, or a `WholeParameterOptimizer`.
        rank0_only: other ranks get an empty dict.

    Returns:
        The format of ``Optimizer.state_dict()``, which plain torch and ZeroRedundancyOptimizer load:
        ``{"state": {number: {name: value}}, "param_groups": [..]}``.

    Raises:
        ConfigError, ShardingError, RankMismatchError: on every rank; names the state that cannot be combined.
    """
    return gather_state(_engine_of_all(optimizer, model), optimizer, rank0_only)


def load_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any] | None) -> None:
    """Load a full optimizer state, made on any number of ranks or without sharding. Call it on every rank.

    Args:
        model: a model made by `StreamShard`.
        optimizer: has the class of the optimizer that the state is from, and the same parameters in the same order.
        state_dict: from `full_optimizer_state_dict`, plain torch, or ZeroRedundancyOptimizer after
            ``consolidate_state_dict``. Rank 0's counts; other ranks may pass None.

    Raises:
        ConfigError, ShardingError: on every rank, before anything is changed; names the first parameter that is wrong.
    """
    scatter_state(_engine_of_all(optimizer, model), optimizer, state_dict)


def _engine_of_all(optimizer: Optimizer, model: nn.Module) -> Engine:
    """The engine of `model`. Raises if `optimizer` has none of its parameters, or a piece of another model's."""
    engine = engine_of_both(optimizer, model)
    ours = {param.sharded for param in engine.params}
    for piece in (piece_of(param) for param in params_in(optimizer.param_groups) if param not in ours):
        if piece is not None:
            raise ConfigError(
                f"{type(optimizer).__name__} steps {piece.name!r} of another sharded model too: make one optimizer for "
                'each model, or call save_checkpoint(directory, {"a": a, "b": b}, optimizer) and load_checkpoint'
            )
    return engine

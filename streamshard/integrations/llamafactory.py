"""LLaMA-Factory's v1 trainers with StreamShard in the place of their backend ``fsdp2``. See docs/guide/trainers.md.

Start them with ``torchrun --nproc-per-node 8 -m streamshard.integrations.llamafactory sft config.yaml``.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.api import StreamShard
from streamshard.checkpoint.export import load_safetensors
from streamshard.checkpoint.restore import load_checkpoint
from streamshard.checkpoint.save import save_checkpoint
from streamshard.comm.ranks import run_on_first
from streamshard.config import Precision
from streamshard.core.module_state import engine_of
from streamshard.errors import ConfigError


class StreamShardBackend:
    """The methods of a backend. The trainers ask for some of them only if the backend is called ``fsdp2``."""

    @staticmethod
    def shard_model(model: nn.Module, dist_config: Any, bf16: bool = False, **kwargs: Any) -> nn.Module:
        """Shard `model` in place; with ``init_on_meta`` also load its weights.

        Args:
            model: the trainer's model.
            dist_config: the mapping of that name in the YAML; all but ``name`` are options of `StreamShard`.
            bf16: layers compute in bf16; otherwise in each parameter's own dtype.
            **kwargs: ignored.

        Raises:
            ConfigError: the model is on the meta device on some ranks only.
        """
        mode = getattr(model, "_init_mode", "init_on_default")
        if mode == "init_on_rank0":
            raise ConfigError("init_config: init_on_rank0 does not go with StreamShard: take init_on_meta")
        options = {name: value for name, value in dist_config.items() if name != "name"}
        sharded = StreamShard(
            model, **{"precision": Precision(param_dtype=torch.bfloat16 if bf16 else None), **options}
        )
        if mode == "init_on_meta":
            load_safetensors(sharded, model.config.name_or_path)  # type: ignore[union-attr, arg-type]  # transformers'
        return sharded

    @staticmethod
    def save_model(model: Any, output_dir: str, processor: Any) -> None:
        """Write the weights, each rank its own bytes, and the tokenizer's files."""
        model.save_pretrained(output_dir)
        run_on_first(
            engine_of(model).ranks,
            "save a processor",
            lambda: processor.save_pretrained(output_dir),
            at=f"to {output_dir}",
        )

    @classmethod
    def save_checkpoint(cls, model: Any, optimizer: Optimizer, ckpt_dir: str, **kwargs: Any) -> None:
        """Write a checkpoint of StreamShard beside the trainer's other files."""
        # `ckpt_dir` holds one checkpoint.
        save_checkpoint(Path(ckpt_dir, "streamshard"), model, optimizer, step=0, keep=1)
        if kwargs.get("save_ckpt_as_hf"):
            cls.save_model(model, str(Path(ckpt_dir, "hf_model")), kwargs["processor"])

    @staticmethod
    def load_checkpoint(model: Any, optimizer: Optimizer, ckpt_dir: str, **kwargs: Any) -> None:
        """Continue from a checkpoint of `save_checkpoint`, on any number of ranks."""
        load_checkpoint(Path(ckpt_dir, "streamshard"), model, optimizer)


def register() -> None:
    """Register `StreamShardBackend` as ``fsdp2``."""
    package = "llamafactory.v1.plugins.trainer_plugins.distributed"
    try:
        plugin = importlib.import_module(f"{package}.interface").DistributedPlugin("fsdp2")
    except ModuleNotFoundError:  # LLaMA-Factory 0.9.5 registers each method by itself
        plugin = importlib.import_module(f"{package}.hub").DistributedPlugin("fsdp2")
        plugin.register()(StreamShardBackend.shard_model)
        for name in ("save_model", "save_checkpoint", "load_checkpoint"):
            plugin.register(name)(getattr(StreamShardBackend, name))
    else:
        plugin.register()(StreamShardBackend)


if __name__ == "__main__":
    register()
    importlib.import_module("llamafactory.v1.launcher").main()

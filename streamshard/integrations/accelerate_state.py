"""`save_state` and `load_state`: what an Accelerator has prepared, as a checkpoint of `save_checkpoint`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.data_loader import SeedableRandomSampler
from torch import nn

from streamshard.checkpoint.restore import load_checkpoint
from streamshard.checkpoint.save import save_checkpoint
from streamshard.config import parse_path
from streamshard.engine.module_state import handle_of
from streamshard.errors import ConfigError

__all__ = ["load_run", "save_run"]


def save_run(accelerator: Any, models: Sequence[nn.Module], output_dir: str | os.PathLike[str] | None) -> Path:
    """See `StreamShardAccelerator.save_state`; `models` are those it has prepared, uncompiled."""
    _refuse_hooks(accelerator)
    parts, naming = _parts(accelerator, models), accelerator.project_configuration
    parts["extra"].update({name: _loader_state(loader) for name, loader in _loaders(accelerator).items()})
    parts["extra"]["accelerator"] = {"step": accelerator.step}
    number, naming.iteration = naming.iteration, naming.iteration + 1
    if naming.automatic_checkpoint_naming:
        directory = _directory(accelerator, "output_dir", None)
        return save_checkpoint(directory, **parts, step=number, keep=naming.total_limit).path
    directory = _directory(accelerator, "output_dir", output_dir)
    save_checkpoint(directory, **parts, step=0, keep=1)
    return directory


def load_run(accelerator: Any, models: Sequence[nn.Module], input_dir: str | os.PathLike[str] | None) -> int:
    """See `StreamShardAccelerator.load_state`. Returns the accelerator's step."""
    _refuse_hooks(accelerator)
    saved = load_checkpoint(_directory(accelerator, "input_dir", input_dir), **_parts(accelerator, models))
    for name, loader in _loaders(accelerator).items():
        if name in saved:
            _load_loader(loader, saved[name])
    step: int = saved["accelerator"]["step"]
    return step


def _directory(accelerator: Any, name: str, given: str | os.PathLike[str] | None) -> Path:
    """The directory that is `given` as argument `name`, or that of automatic naming."""
    if given is None and accelerator.project_configuration.automatic_checkpoint_naming:
        return parse_path("Accelerator(project_dir=..)", accelerator.project_dir) / "checkpoints"
    return parse_path(name, given).expanduser()


def _refuse_hooks(accelerator: Any) -> None:
    for kind in ("save", "load"):
        if getattr(accelerator, f"_{kind}_model_state_pre_hook"):
            raise ConfigError(
                f"a hook of register_{kind}_state_pre_hook would get models whose parameters are this rank's pieces. "
                "save_state saves all models. Let register_for_checkpointing(object) save whatever else has a "
                "state_dict, such as averages of weights, and let all ranks call model.save_pretrained(directory) "
                "beside save_state"
            )


def _parts(accelerator: Any, models: Sequence[nn.Module]) -> dict[str, Any]:
    """Arguments of `save_checkpoint` and `load_checkpoint`."""
    scalers = [accelerator.scaler] if accelerator.scaler is not None else []
    objects = (("scheduler", accelerator._schedulers), ("scaler", scalers), ("object", accelerator._custom_objects))
    return {
        "model": _numbered([model for model in models if handle_of(model) is not None or model.state_dict()]),
        "optimizer": _numbered([optimizer.optimizer for optimizer in accelerator._optimizers]),
        "extra": {f"{kind}.{i}": each for kind, given in objects for i, each in enumerate(given)},
    }


def _numbered(each: list[Any]) -> Any:
    """One by itself, several by their number, which their names have then."""
    if len(each) > 1:
        return {str(number): one for number, one in enumerate(each)}
    return each[0] if each else None


# -- data loaders -----------------------------------------------------------------------------------------------------


def _loaders(accelerator: Any) -> dict[str, Any]:
    """Prepared data loaders, by name."""
    found = enumerate(accelerator._dataloaders)
    return {f"loader.{i}": each for i, each in found if hasattr(each, "iteration")}


def _loader_state(loader: Any) -> dict[str, Any]:
    """The loader's epoch, the seed of its order if it is a seeded one, and the place of a stateful loader."""
    running = [each for each in loader.gradient_state.dataloader_references if each is not None]
    is_over = loader in running and loader.end_of_dataloader  # the loader itself counts it a moment later
    state: dict[str, Any] = {"iteration": loader.iteration + is_over}
    if isinstance(sampler := _sampler_of(loader), SeedableRandomSampler):
        state["seed"] = sampler.initial_seed
    if loader.use_stateful_dataloader:
        state["stateful"] = loader.state_dict()
    return state


def _load_loader(loader: Any, state: Mapping[str, Any]) -> None:
    loader.iteration = state["iteration"]
    if isinstance(sampler := _sampler_of(loader), SeedableRandomSampler) and "seed" in state:
        sampler.initial_seed = state["seed"]
    if loader.use_stateful_dataloader and "stateful" in state:
        # At the end of an epoch only a dataset with a state needs it; else it would draw one more random number.
        is_over = state["stateful"].get("_iterator_finished") and not hasattr(loader.dataset, "state_dict")
        loader.load_state_dict({} if is_over else state["stateful"])
        loader.dl_state_dict = state["stateful"]  # so that a save before the next epoch saves the same


def _sampler_of(loader: Any) -> Any:
    """The innermost sampler: accelerate's batch samplers hold the one that draws the numbers."""
    sampler = None
    while (inner := getattr(loader, "batch_sampler", None)) is not None or hasattr(loader, "sampler"):
        loader = sampler = loader.sampler if inner is None else inner
    return sampler

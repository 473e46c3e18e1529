"""`save_state` and `load_state`: what an Accelerator has prepared, as a checkpoint of `save_checkpoint`."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch import nn
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from streamshard.api import StreamShard
from streamshard.checkpoint.directory import latest
from streamshard.comm.objects import gather_from_all_ranks, run_on_all_ranks
from streamshard.comm.ranks import Ranks
from streamshard.engine.handle import engine_of, handle_of
from streamshard.errors import CheckpointError, ConfigError, warn_user
from streamshard.log import log
from streamshard.training_state import load_checkpoint, save_checkpoint

__all__ = ["Run", "load_run", "remember_epochs", "save_run"]


class Run(NamedTuple):
    """What there is to save.

    Attributes:
        accelerator: an Accelerator, which has prepared it.
        models: those it has prepared, without what ``torch.compile`` has put around them.
    """

    accelerator: Any
    models: list[nn.Module]

    @property
    def ranks(self) -> Ranks:
        return next(engine_of(model).ranks for model in self.models if handle_of(model) is not None)

    def parts(self) -> dict[str, Any]:
        """Arguments of `save_checkpoint` and `load_checkpoint`."""
        accelerator = self.accelerator
        models = [model for model in self.models if handle_of(model) is not None or model.state_dict()]
        return {
            "model": _numbered(models),
            "optimizer": _numbered([optimizer.optimizer for optimizer in accelerator._optimizers]),
            "scheduler": _numbered(accelerator._schedulers),
            "scaler": accelerator.scaler,
            "extra": {f"object.{i}": each for i, each in enumerate(accelerator._custom_objects)},
        }

    def loaders(self) -> dict[str, LoaderState]:
        """By name."""
        return {
            f"loader.{i}": LoaderState(each, self.ranks)
            for i, each in enumerate(self.accelerator._dataloaders)
            if hasattr(each, "iteration")
        }


def _numbered(each: list[Any]) -> Any:
    """One by itself, several by their number, which their names have then."""
    if len(each) > 1:
        return {str(number): one for number, one in enumerate(each)}
    return each[0] if each else None


# -- data loaders -----------------------------------------------------------------------------------------------------


class _GoesOn(Sampler[int]):
    """A sampler whose next epoch may be one that a run goes on within.

    Attributes:
        goes_on_with: the default generator's state within that epoch. Entering a loader takes from it.
        loaded: what was loaded and not begun yet; a save before that saves the same again.
    """

    goes_on_with: torch.Tensor | None = None
    loaded: Mapping[str, Any] | None = None

    def __iter__(self) -> Iterator[int]:
        self.loaded = None
        if self.goes_on_with is not None:
            torch.set_rng_state(self.goes_on_with)
            self.goes_on_with = None
        yield from super().__iter__()


class _InOrder(_GoesOn, SequentialSampler):
    pass


class _Seeded(_GoesOn, SeedableRandomSampler):  # type: ignore[misc]  # accelerate is not typed
    pass


class _Drawn(RandomSampler):
    """torch's, with the same numbers, that knows what its latest epoch was drawn from.

    Attributes:
        drawn_from: the generator's state when that epoch began; without a generator of its own, the seed that torch's
            class draws from the default one. None before the first.
        draws_from: the next epoch is drawn from this.
    """

    drawn_from: torch.Tensor | int | None = None
    draws_from: torch.Tensor | int | None = None

    def __iter__(self) -> Iterator[int]:
        given, self.draws_from = self.draws_from, None
        if self.generator is not None:
            if isinstance(given, torch.Tensor):
                self.generator.set_state(given)
            self.drawn_from = self.generator.get_state()
            yield from super().__iter__()
            return
        seed = given if isinstance(given, int) else int(torch.empty((), dtype=torch.int64).random_().item())
        self.drawn_from = seed
        own = torch.Generator().manual_seed(seed)
        yield from RandomSampler(self.data_source, self.replacement, self._num_samples, own)


class _Random(_GoesOn, _Drawn):
    pass


_REMEMBERING = {SequentialSampler: _InOrder, SeedableRandomSampler: _Seeded, RandomSampler: _Random}


def remember_epochs(loader: Any) -> None:
    """Let the sampler of a prepared loader remember, whatever ``skip_first_batches`` makes of the loader later."""
    sampler = _sampler_of(loader)
    if type(sampler) in _REMEMBERING:
        sampler.__class__ = _REMEMBERING[type(sampler)]


class LoaderState:
    """Where a prepared data loader is in its epochs; within one, ``skip_first_batches`` goes on.

    Args:
        loader: prepared by an Accelerator.
        ranks: of which the first one's random numbers count, as they do when an epoch begins.
    """

    def __init__(self, loader: Any, ranks: Ranks) -> None:
        self._loader = loader
        self._ranks = ranks

    def collect(self) -> dict[str, Any]:
        """What is saved. Collective."""
        loader, sampler = self._loader, _sampler_of(self._loader)
        if isinstance(sampler, _GoesOn):  # the first rank's may be the only one that is asked for numbers
            loaded = self._ranks.of_first(sampler.loaded)
            if loaded is not None:
                return {**loaded, "iteration": loader.iteration}
        running = [each for each in loader.gradient_state.dataloader_references if each is not None]
        inside = next((each for each in running if sampler is not None and _sampler_of(each) is sampler), None)
        within = inside is not None and not inside.end_of_dataloader  # else all of its epoch has been handed out
        state: dict[str, Any] = {"iteration": loader.iteration + (inside is loader and not within), "within": within}
        if isinstance(sampler, SeedableRandomSampler):
            state["seed"] = sampler.initial_seed
        if isinstance(sampler, _Random):
            after = None if sampler.generator is None else sampler.generator.get_state()
            state["draws_from"] = self._ranks.of_first(sampler.drawn_from if within else after)
        if loader.use_stateful_dataloader:
            state["stateful"] = loader.state_dict()
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on there."""
        loader, sampler = self._loader, _sampler_of(self._loader)
        loader.iteration = state["iteration"]
        if isinstance(sampler, _GoesOn):
            sampler.loaded = state
        if isinstance(sampler, SeedableRandomSampler) and "seed" in state:
            sampler.initial_seed = state["seed"]
        if isinstance(sampler, _Random):
            drawn = state.get("draws_from")
            sampler.draws_from = drawn.cpu() if isinstance(drawn, torch.Tensor) else drawn
        if isinstance(sampler, _GoesOn):
            sampler.goes_on_with = torch.get_rng_state() if state["within"] else None
        if loader.use_stateful_dataloader and "stateful" in state:
            # Behind an epoch its state is of use to a dataset alone; to pass over it draws a random number more.
            is_over = state["stateful"].get("_iterator_finished") and not hasattr(loader.dataset, "state_dict")
            loader.load_state_dict({} if is_over else state["stateful"])
            loader.dl_state_dict = state["stateful"]  # else it says where it was made until it is entered


def _sampler_of(loader: Any) -> Any:
    """What draws the numbers, inside of what makes batches of them, a rank's part of these, and leaves some out."""
    sampler = None
    inner = loader
    while (inner := _inside(inner)) is not None:
        sampler = inner
    return sampler


def _inside(value: Any) -> Any:
    # Not `or`: a sampler of an unknown length may not be asked whether it is true.
    inner = getattr(value, "batch_sampler", None)
    return getattr(value, "sampler", None) if inner is None else inner


# -- save -------------------------------------------------------------------------------------------------------------


def save_run(run: Run, output_dir: str | os.PathLike[str] | None) -> Path:
    """See `StreamShardAccelerator.save_state`."""
    accelerator, ranks = run.accelerator, run.ranks
    naming = accelerator.project_configuration
    directory = run_on_all_ranks(ranks, "save_state", lambda: _new_directory(accelerator, output_dir))
    # All have looked before one of them makes it.
    run_on_all_ranks(ranks, f"save to {directory}", lambda: directory.mkdir(parents=True, exist_ok=True))
    hooks = list(accelerator._save_model_state_pre_hook.values())
    if hooks:
        weights = [_whole_state(model) for model in run.models]

        def call() -> None:
            for hook in hooks:
                hook(accelerator._models, weights, str(directory))

        run_on_all_ranks(ranks, "run the hooks of register_save_state_pre_hook", call)
    parts = run.parts()
    parts["extra"].update({name: loader.collect() for name, loader in run.loaders().items()})
    parts["extra"]["accelerator"] = {"step": accelerator.step}
    save_checkpoint(directory, **parts, step=0)
    if naming.automatic_checkpoint_naming and naming.total_limit is not None:
        limit = naming.total_limit
        run_on_all_ranks(
            ranks, "delete old checkpoints", lambda: _delete_old(directory.parent, limit) if ranks.is_first else None
        )
    naming.iteration += 1
    return directory


def _whole_state(model: nn.Module) -> dict[str, Any]:
    if handle_of(model) is None:
        return model.state_dict()
    return StreamShard.full_state_dict(model)  # type: ignore[arg-type]  # it is one


def _new_directory(accelerator: Any, output_dir: str | os.PathLike[str] | None) -> Path:
    naming = accelerator.project_configuration
    if not naming.automatic_checkpoint_naming:
        if output_dir is None:
            raise ConfigError("save_state() without output_dir needs ProjectConfiguration(automatic_checkpoint_naming)")
        return Path(output_dir).expanduser()
    directory = _checkpoints_of(accelerator) / f"checkpoint_{naming.iteration}"
    if latest(directory) is not None:
        raise ConfigError(
            f"{directory} exists: set accelerator.project_configuration.iteration to the number of the next checkpoint"
        )
    return directory


def _checkpoints_of(accelerator: Any) -> Path:
    if accelerator.project_dir is None:
        raise ConfigError("automatic_checkpoint_naming needs Accelerator(project_dir=..)")
    return Path(accelerator.project_dir) / "checkpoints"


def _numbered_in(directory: Path) -> list[Path]:
    """Checkpoints with numbers, oldest first."""
    found = [path for path in directory.iterdir() if re.fullmatch(r"checkpoint_\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.rpartition("_")[2]))


def _delete_old(directory: Path, limit: int) -> None:
    for path in _numbered_in(directory)[:-limit]:
        log.info("deleting %s, to keep %d checkpoints", path, limit)
        shutil.rmtree(path)


# -- load -------------------------------------------------------------------------------------------------------------


def load_run(run: Run, input_dir: str | os.PathLike[str] | None, *, strict: bool) -> int:
    """See `StreamShardAccelerator.load_state`. Returns the accelerator's step."""
    accelerator, ranks = run.accelerator, run.ranks

    def find() -> Path:
        return _existing_directory(accelerator, input_dir) if ranks.is_first else Path()

    directory = gather_from_all_ranks(ranks, "load_state", find)[0]
    left = list(accelerator._models)

    def call() -> None:
        for hook in accelerator._load_model_state_pre_hook.values():
            hook(left, str(directory))

    run_on_all_ranks(ranks, "run the hooks of register_load_state_pre_hook", call)
    remaining = set(map(id, left))
    taken = [inner for model, inner in zip(accelerator._models, run.models, strict=True) if id(model) not in remaining]
    # Their optimizers' state is named after their parameters, so they are loaded with the others, and put back.
    kept = [(tensor, tensor.detach().clone()) for model in taken for tensor in (*model.parameters(), *model.buffers())]
    saved = load_checkpoint(directory, **run.parts(), strict=strict)
    with torch.no_grad():
        for tensor, own in kept:
            tensor.copy_(own)
    for name, loader in run.loaders().items():
        if name in saved:
            loader.load(saved[name])
    known = {f"object.{i}" for i in range(len(accelerator._custom_objects))}
    if more := [name for name in saved if name.startswith("object.") and name not in known]:
        warn_user(f"{saved.path} has {', '.join(more)}, for which nothing is registered: register_for_checkpointing")
    step: int = saved["accelerator"]["step"]
    return step


_ACCELERATES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "optimizer.bin")


def _existing_directory(accelerator: Any, input_dir: str | os.PathLike[str] | None) -> Path:
    if input_dir is not None:
        given = Path(input_dir).expanduser()
        if latest(given) is None:
            _refuse_accelerates(given)
        return given
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ConfigError("load_state() without input_dir needs ProjectConfiguration(automatic_checkpoint_naming)")
    directory = _checkpoints_of(accelerator)
    found = _numbered_in(directory) if directory.is_dir() else []
    whole = [path for path in found if latest(path) is not None]
    if not whole:
        for path in reversed(found):
            _refuse_accelerates(path)
        raise CheckpointError(f"{directory} holds no whole checkpoint")
    return whole[-1]


def _refuse_accelerates(directory: Path) -> None:
    """Raise if accelerate's own `save_state` has written it."""
    if any((directory / name).exists() for name in _ACCELERATES):
        raise CheckpointError(
            f"{directory} was saved by accelerate's own Accelerator. On every rank, after prepare: its weights with "
            "streamshard.load_safetensors(model, directory) (pytorch_model.bin: model.load_state_dict(torch.load())), "
            "optimizer.bin with streamshard.load_optimizer_state_dict(model, optimizer.optimizer, torch.load(file)), "
            "scheduler.bin with scheduler.load_state_dict(torch.load(file)); then accelerator.save_state(another)"
        )

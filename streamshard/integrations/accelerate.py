"""accelerate: an `Accelerator` that shards the models it prepares. `save_state` writes a StreamShard checkpoint."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import DynamoBackend, is_compiled_module, recursively_apply
from torch import nn

from streamshard.api import StreamShard
from streamshard.checkpoint.export import export_safetensors
from streamshard.checkpoint.restore import load_checkpoint
from streamshard.checkpoint.save import save_checkpoint
from streamshard.comm.groups import make_default_group
from streamshard.config import AnyPath, Precision, parse_path, parse_precision
from streamshard.core.clipping import clip_grads
from streamshard.core.module_state import engine_of, handle_of
from streamshard.core.optimizer_hooks import follow_model
from streamshard.device import accelerator as accelerator_kind
from streamshard.errors import ConfigError, log
from streamshard.forms import successor
from streamshard.planning.structure import modules_inside, replacing

OPTIONS = tuple(inspect.signature(StreamShard.__init__).parameters)[2:]  # behind self and module
_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_LAUNCH = "accelerate launch --multi_gpu --num_machines 1 --num_processes N script.py (on CPUs too), or torchrun"


class StreamShardAccelerator(Accelerator):  # type: ignore[misc]  # accelerate is not typed
    """`accelerate.Accelerator` whose `prepare` shards models with `StreamShard`, at any number of processes.

    `prepare` shards models in place, so you may make optimizers before or after. All other methods work as in
    accelerate's own class.

    Args:
        *args: accelerate's arguments.
        **kwargs: accelerate's arguments, and options of `StreamShard` for all models (``units``, ``precision``,
            ``weight_slots``, ...). Of a ``parallelism_config`` the data and context parallel axes are the mesh of
            `StreamShard`. `prepare` takes models whose parameters are DTensors on its ``tp`` axis.

    ``mixed_precision`` decides the dtype in which layers compute: ``"bf16"`` or ``"fp16"``. With ``"no"`` layers
    compute with each parameter in its own dtype. The ``param_dtype`` of `precision` must be this dtype, or fp32.

    Raises:
        ConfigError: FSDP, DeepSpeed or Megatron-LM is configured too, or accelerate knows of fewer processes than were
            launched. The message gives the right command. `prepare` raises for an invalid option,
            and for a `precision` that contradicts ``mixed_precision``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        if "LOCAL_RANK" in os.environ and accelerator_kind() in (None, "cpu"):
            kwargs.setdefault("cpu", True)  # else accelerate trains each process by itself
        parallelism = kwargs.pop("parallelism_config", None)  # accelerate takes it on GPUs, and with FSDP2 only
        super().__init__(*args, **kwargs)
        _check_launch(self)  # only now does accelerate know its kind and processes
        self._options = options
        self._takes_rows = False  # inside `gather_for_metrics`
        if parallelism is not None:
            self.state.parallelism_config = parallelism
        if self.parallelism_config is not None:
            _check_sizes(self.parallelism_config, self.num_processes)
            # accelerate's data loaders read it: ranks along "tp" and "cp" get the same rows.
            self.state.device_mesh = self.parallelism_config.get_device_mesh(self.device.type)
            self._options = {"mesh": _mesh_of(self.parallelism_config), **options}  # the user's own mesh= counts
        if self.mixed_precision == "fp16":
            # On the CPU accelerate has neither autocast nor a scaler for fp16, but gradients underflow there too.
            self.native_amp = True
            handler = self.scaler_handler
            self.scaler = torch.amp.GradScaler(self.device.type, **({} if handler is None else handler.to_kwargs()))
        if not dist.is_initialized():  # one process, which accelerate trains without a process group
            store = dist.HashStore()  # type: ignore[attr-defined]  # not re-exported in stubs
            make_default_group(self.device, store=store, rank=0, world_size=1)

    # -- prepare ------------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As in accelerate. Optimizers made before sharding get the model's parameters in the place of DTensors."""
        prepared = super().prepare(*args, **kwargs)
        for optimizer in self._optimizers:
            follow_model(optimizer.optimizer)
        return prepared

    def _prepare_tp(self, *args: Any) -> Any:
        """accelerate would put DTensors into models that it shards by FSDP2."""
        return args

    def _prepare_cp(self, *args: Any) -> Any:
        """accelerate would change torch's attention; the user's own code exchanges keys and values."""
        return args

    def prepare_model(self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        """Shard `model` in place. accelerate wraps its forward in autocast, and compiles it if configured.

        Args:
            model: a model that `StreamShard` accepts, or a sharded one. A model without parameters is only moved.
            device_placement: ignored for models with parameters: they stay on the device of their shards.
            evaluation_mode: the model gets no memory for gradients, and cannot be trained.

        Returns:
            The same object; with a dynamo backend, the result of ``torch.compile``.
        """
        if next(model.parameters(), None) is None:
            # In training mode accelerate refuses, on an axis "tp", a model without a tensor parallel plan.
            return super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        # accelerate's `compile_regions` makes a second model object, with the layers in new lists.
        plugin = self.state.dynamo_plugin
        if plugin.use_regional_compilation and plugin.backend != DynamoBackend.NO:
            raise ConfigError("use_regional_compilation: leave it out, and call layer.compile() before prepare")
        if _sharded_in(model) is None:
            self.shard(model, evaluation_mode=evaluation_mode)
        # In evaluation mode, or accelerate would wrap the model in DDP.
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def shard(self, model: nn.Module, *, evaluation_mode: bool = False) -> None:
        """Shard `model`, without the rest of `prepare_model`. `prepare` accepts the model afterwards."""
        model = _uncompiled(model)
        options = {**self._options, "precision": self._precision()}
        trained = [param for param in model.parameters() if param.requires_grad and evaluation_mode]
        try:
            for param in trained:
                param.requires_grad_(False)  # a parameter that is frozen now gets no main grads
            device = engine_of(StreamShard(model, **options)).ranks.streams.device
        finally:
            for param in trained:
                successor(param).requires_grad_(True)  # a DTensor's place has another parameter now
        for module in modules_inside(model):
            if "hf_device_map" in vars(module):  # accelerate refuses quantized models on other devices
                vars(module)["hf_device_map"] = {"": device}

    def _precision(self) -> Precision:
        if self.mixed_precision not in _DTYPES:
            raise ConfigError(f"mixed_precision={self.mixed_precision!r}: wanted 'no', 'bf16' or 'fp16'")
        wanted, given = _DTYPES[self.mixed_precision], self._options.get("precision")
        given = Precision(param_dtype=wanted) if given is None else parse_precision(given)
        if given.param_dtype not in (wanted, torch.float32, None):
            what = f"precision has param_dtype={given.param_dtype}, and mixed_precision is {self.mixed_precision!r}"
            raise ConfigError(f"{what}: wanted the same dtype, or no precision")
        return given

    # -- a step -------------------------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """As in accelerate: from all processes."""
        # accelerate's `gather_for_metrics` calls this, and then cuts off rows that fill up the last batch. So rows of
        # other ranks along "tp" have to go here.
        gathered = super().gather(tensor)
        if not self._takes_rows:
            return gathered
        ranks, shape = self._ranks_of_rows(), (self.num_processes, -1)
        return recursively_apply(lambda rows: rows.unflatten(0, shape)[ranks].flatten(0, 1), gathered)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As in accelerate: each row once, although ranks along the axis "tp" have the same rows."""
        rows = self._ranks_of_rows()
        if len(rows) == self.num_processes:
            return super().gather_for_metrics(input_data, use_gather_object)
        if not use_gather_object:
            try:
                recursively_apply(lambda tensor: tensor, input_data, error_on_other_type=True)
            except TypeError:  # accelerate gathers objects then
                use_gather_object = True
        if use_gather_object and self.process_index not in rows:
            input_data = []  # lists of objects are joined
        with replacing((self.__dict__, "_takes_rows", not use_gather_object)):
            return super().gather_for_metrics(input_data, use_gather_object)

    def _ranks_of_rows(self) -> list[int]:
        """The first rank along "tp", of each tensor parallel group. Ranks along "cp" compute other parts of rows."""
        mesh = None if self.parallelism_config is None else self.parallelism_config.device_mesh
        if mesh is None:
            return list(range(self.num_processes))
        first = tuple(0 if name == "tp" else slice(None) for name in mesh.mesh_dim_names)
        ranks: list[int] = mesh.mesh[first].flatten().tolist()
        return ranks

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Like accelerate's. Clips a sharded model's gradients as `StreamShard.clip_grad_norm_` does."""
        params: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self.unscale_gradients()  # accelerate's own does, so users do not
        for model in filter(None, map(_sharded_in, self._models)):
            engine = engine_of(model)
            if {shard.sharded for shard in engine.params}.issuperset(params):
                return clip_grads(engine, params, max_norm, norm_type)
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    # -- whole weights ------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """The full state dict on every rank: original names and shapes, weights fp32, in CPU memory. Collective."""
        inner = _sharded_in(model)
        if inner is None:
            return super().get_state_dict(model, unwrap)
        # By the class: a model may have a method of this name, which wins.
        return StreamShard.full_state_dict(inner, rank0_only=False)  # type: ignore[arg-type]  # it is one

    def save_model(
        self, model: nn.Module, save_directory: AnyPath, max_shard_size: Any = "10GB", safe_serialization: bool = True
    ) -> None:
        """Write the weights. Call it on every rank.

        Every rank writes its own bytes of a sharded model, as in `export_safetensors`. With
        ``safe_serialization=False`` every rank gathers the full weights in its host's memory, and rank 0 writes.
        """
        inner = _sharded_in(model)
        if inner is None or not safe_serialization:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
        else:
            export_safetensors(inner, save_directory, max_shard_size=max_shard_size)

    # -- the run ------------------------------------------------------------------------------------------------------

    def save_state(self, output_dir: AnyPath | None = None, **kwargs: Any) -> Any:
        """Save every prepared or registered object in a checkpoint. Call it on every rank, between steps.

        With automatic naming the checkpoint is ``project_dir/checkpoints/checkpoint-N``. When it is complete, older
        checkpoints are deleted down to ``total_limit``.

        Returns:
            The directory.

        Raises:
            CheckpointError: on every rank; the new checkpoint is removed.
            ShardingError: no prepared model is sharded.
        """
        parts, naming = self._parts(), self.project_configuration
        parts["extra"].update({name: _loader_state(loader) for name, loader in self._loaders().items()})
        parts["extra"]["accelerator"] = {"step": self.step}
        directory = self._directory(None if naming.automatic_checkpoint_naming else output_dir)
        number, naming.iteration = naming.iteration, naming.iteration + 1
        if naming.automatic_checkpoint_naming:
            return save_checkpoint(directory, **parts, step=number, keep=naming.total_limit).path
        save_checkpoint(directory, **parts, step=0, keep=1)  # `output_dir` holds one checkpoint
        return directory

    def load_state(self, input_dir: AnyPath | None = None, **kwargs: Any) -> None:
        """Continue from a checkpoint of `save_state`, on any number of ranks. Call it on every rank.

        Args:
            input_dir: the directory given to `save_state`. None, with automatic naming: the latest checkpoint.
            **kwargs: ignored: nothing is unpickled, and values that do not fit always raise.

        Raises:
            CheckpointError: on every rank, before anything has changed.
        """
        saved = load_checkpoint(self._directory(input_dir), **self._parts())
        for name, loader in self._loaders().items():
            if name in saved.by_rank:
                if self.is_main_process:
                    log.warning("%s: its position differs between the ranks that saved it: its epoch starts anew", name)
                _load_loader(loader, {**saved.by_rank[name][0], "stateful": {}})  # all ranks had one epoch
            elif name in saved:
                _load_loader(loader, saved[name])
        self.step = saved["accelerator"]["step"]

    def _directory(self, given: AnyPath | None) -> Path:
        """The user's directory, or the directory of automatic naming."""
        if given is None and self.project_configuration.automatic_checkpoint_naming:
            return Path(self.project_dir) / "checkpoints"
        return parse_path("directory", given).expanduser()

    def register_save_state_pre_hook(self, hook: Any) -> NoReturn:
        """Refused: a hook would get models with this rank's pieces.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "a hook of register_save_state_pre_hook or register_load_state_pre_hook would get models with this rank's "
            "pieces: leave it out. register_for_checkpointing(object) saves an object with a state_dict, such as "
            "diffusers' EMAModel made after prepare"
        )

    register_load_state_pre_hook = register_save_state_pre_hook

    def _parts(self) -> dict[str, Any]:
        """The arguments model, optimizer and extra of `save_checkpoint` and `load_checkpoint`."""
        models = [_uncompiled(model) for model in self._models]
        plain = [model for model in models if handle_of(model) is None and model.state_dict()]
        scalers = [self.scaler] if self.scaler is not None else []
        objects = (self._schedulers, scalers, self._custom_objects, plain)
        named = zip(("scheduler", "scaler", "object", "model"), objects, strict=True)
        return {
            "model": _numbered([model for model in models if handle_of(model) is not None]),
            "optimizer": _numbered([optimizer.optimizer for optimizer in self._optimizers]),
            "extra": {f"{kind}.{i}": each for kind, given in named for i, each in enumerate(given)},
        }

    def _loaders(self) -> dict[str, Any]:
        """Prepared data loaders, by name."""
        return {f"loader.{i}": each for i, each in enumerate(self._dataloaders) if hasattr(each, "iteration")}


def _sharded_in(model: nn.Module) -> nn.Module | None:
    """`model`, or the model inside its ``torch.compile`` wrapper, if it is sharded; else None."""
    inner = _uncompiled(model)
    return inner if handle_of(inner) is not None else None


def _uncompiled(model: nn.Module) -> nn.Module:
    inner: Any = model._orig_mod if is_compiled_module(model) else model
    return inner  # type: ignore[no-any-return]


def _check_sizes(parallelism: ParallelismConfig, processes: int) -> None:
    if parallelism.sp_size > 1:
        raise ConfigError("ParallelismConfig(sp_size=...) is DeepSpeed's: take cp_size, and exchange keys and values")
    if parallelism.cp_enabled and parallelism.dp_replicate_enabled:
        raise ConfigError("ParallelismConfig(dp_replicate_size=..., cp_size=...): leave one of them out, or give mesh=")
    if parallelism.total_size not in (1, processes):  # 1: no axis is given
        raise ConfigError(f"{parallelism!r} is of {parallelism.total_size} processes, and {processes} were launched")


def _mesh_of(parallelism: ParallelismConfig) -> Any:
    """The mesh of `StreamShard`: replicas, and ranks that share one replica. None: each rank has other DTensors."""
    mesh, names = parallelism.device_mesh, [*parallelism.dp_dim_names]
    if not parallelism.cp_enabled:
        return mesh[tuple(names)] if names else None
    # Ranks along "cp" have parts of the same rows, so their gradients belong to one mean.
    return mesh[tuple(parallelism.dp_shard_cp_dim_names)]._flatten("dp_shard_cp")


def _check_launch(accelerator: Accelerator) -> None:
    """Raise if accelerate itself would shard models, or knows of fewer processes than were launched."""
    kind, known = accelerator.distributed_type.value, accelerator.num_processes
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        what = f"accelerate was asked for {kind}: leave it out of the arguments and of accelerate's config file"
        raise ConfigError(f"{what}, start with {_LAUNCH}, and give options of StreamShard, such as mesh=")
    launched = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if launched != known:
        what = f"{launched} processes were launched, and accelerate knows of {known} ({kind}): start with {_LAUNCH}"
        raise ConfigError(f"{what}, and make StreamShardAccelerator before other objects of accelerate")


# -- saved runs ----------------------------------------------------------------------------------------------------


def _numbered(each: list[Any]) -> Any:
    """One object as it is; several as a dict by number, which becomes part of their names."""
    if len(each) > 1:
        return {str(number): one for number, one in enumerate(each)}
    return each[0] if each else None


def _loader_state(loader: Any) -> dict[str, Any]:
    """The loader's epoch, the seed of a seeded sampler, and the position of a stateful loader."""
    running = [each for each in loader.gradient_state.dataloader_references if each is not None]
    is_over = loader in running and loader.end_of_dataloader  # the loader counts this epoch a moment later
    state: dict[str, Any] = {"iteration": loader.iteration + is_over}
    if isinstance(sampler := loader.get_sampler(), SeedableRandomSampler):
        state["seed"] = sampler.initial_seed
    if loader.use_stateful_dataloader:
        state["stateful"] = loader.state_dict()
    return state


def _load_loader(loader: Any, state: Mapping[str, Any]) -> None:
    loader.iteration = state["iteration"]
    if isinstance(sampler := loader.get_sampler(), SeedableRandomSampler) and "seed" in state:
        sampler.initial_seed = state["seed"]
    if loader.use_stateful_dataloader and "stateful" in state:
        # At an epoch's end only a dataset with a state needs it: without one the loader would draw a random number.
        is_over = state["stateful"].get("_iterator_finished") and not hasattr(loader.dataset, "state_dict")
        loader.load_state_dict({} if is_over else state["stateful"])
        loader.dl_state_dict = state["stateful"]  # so that a save before the next epoch saves the same

"""The conventions of transformers, diffusers and PEFT: tied weights, initialisation, names in files, configs.

Where possible the libraries' own functions decide, so that files follow the installed versions.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import re
import sys
import types
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from streamshard.conventions import Conventions, ForLoading, Tensors
from streamshard.errors import CheckpointError, ConfigError, ShardingError
from streamshard.planning.structure import join_names, modules_inside, modules_of, params_of, replacing

_MODELS = {  # by library: the module and the name of the class of its models
    "transformers": ("transformers.modeling_utils", "PreTrainedModel"),
    "diffusers": ("diffusers.models.modeling_utils", "ModelMixin"),
    "peft": ("peft", "PeftModel"),
}


def builder_of_config(source: str) -> Callable[..., nn.Module]:
    """A function that builds the model of a config, without weights; on a mesh with transformers' own plan.

    Args:
        source: a ``config.json``, its directory, or the name of a model of the hub in the cache: downloads nothing.

    Raises:
        ConfigError: transformers is not installed, cannot read the config, or does not know the architecture. The
            function: transformers has no plan for the model.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
        config = transformers.AutoConfig.from_pretrained(source, local_files_only=True)
        name = (config.architectures or [None])[0]
        kind: Any = transformers.AutoModelForCausalLM.from_config if name is None else getattr(transformers, name)
    except Exception as error:  # transformers raises many classes
        what = str(error).partition("\n")[0]
        raise ConfigError(f"{source} is read by transformers (pip install transformers): {what}") from error

    def build(mesh: DeviceMesh | None = None) -> nn.Module:
        model = kind(copy.deepcopy(config))  # constructors write into it, and plans build several models
        if mesh is not None:
            _cut_by_own_plan(model, mesh)
        return cast(nn.Module, model)

    return build


def _cut_by_own_plan(model: Any, mesh: DeviceMesh) -> None:
    """Tensor parallelism with the plan that transformers has for `model`."""
    try:
        module: Any = importlib.import_module("transformers.distributed.tensor_parallel")
        cut, plan = module.apply_tensor_parallelism, model._expand_parallel_plan(model.tp_plan)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"this version of transformers cannot cut models: {error}") from error
    if not plan:
        raise ConfigError(
            f"transformers has no tensor parallel plan for {type(model).__name__}: give a function that builds the "
            "model on a mesh"
        )
    names = {*dict(model.named_parameters()), *dict(model.named_modules())}  # a tied head has no weight of its own
    cut(model, mesh, {name: style for name, style in plan.items() if name in names})
    model.tie_weights()  # cutting has replaced each Parameter, tied ones too


def is_model_of(module: nn.Module, *libraries: str) -> bool:
    """Whether `module` is a model of one of these libraries: of its class in `_MODELS`, or of a subclass."""
    classes = (_MODELS[library] for library in libraries)  # without its module in this process, a class has no objects
    return isinstance(module, tuple(getattr(sys.modules[of], name) for of, name in classes if of in sys.modules))


def is_from(module: nn.Module, library: str) -> bool:
    """Whether `module` is an object of any class that `library` defines, or of a subclass."""
    return any(each.__module__.partition(".")[0] == library for each in type(module).__mro__)


class HuggingFace(Conventions):
    """The conventions of Hugging Face's libraries. Other models in the process keep plain PyTorch's."""

    def tie_weights(self, root: nn.Module) -> None:
        """Let transformers' models inside `root` tie their weights: ``accelerate.init_empty_weights`` unties some."""
        for module in modules_inside(root):
            if is_model_of(module, "transformers"):
                cast(Any, module).tie_weights()

    def kept_in_fp32(self, root: nn.Module, dtype: torch.dtype | None) -> set[str]:
        """Names of parameters that transformers' models inside `root` keep in fp32 when they load as `dtype`."""
        names: set[str] = set()
        for prefix, module in modules_of(root) if dtype is not None else ():
            globs = is_model_of(module, "transformers") and cast(Any, module)._get_dtype_plan(dtype)
            if globs:
                pattern = re.compile("|".join(glob.replace("*", ".*") for glob in globs))  # transformers searches, too
                names.update(join_names(prefix, name) for name in params_of(module) if pattern.search(name))
        return names

    def embeddings(self, root: nn.Module) -> list[nn.Module]:
        """The modules that the model's methods ``get_input_embeddings`` and ``get_output_embeddings`` return."""
        found = []
        for name in ("get_input_embeddings", "get_output_embeddings"):
            with contextlib.suppress(AttributeError, NotImplementedError):  # no such method; no embedding
                found.append(getattr(root, name)())
        return [module for module in found if isinstance(module, nn.Module)]

    def taking_fakes_for_real(self) -> contextlib.AbstractContextManager[None]:
        """Without it, transformers makes the masks of a graph for any batch: a real batch needs no causal mask."""
        module = sys.modules.get("transformers.utils.import_utils")
        if not hasattr(module, "is_fake_tensor"):  # another version
            return super().taking_fakes_for_real()
        return replacing((module.__dict__, "is_fake_tensor", lambda tensor: False))

    def initialise(self, module: nn.Module) -> bool:
        """Let a transformers model initialise itself. A tied name keeps the parameter of its partner."""
        if not is_model_of(module, "transformers"):
            return False
        tied: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        for inner in modules_inside(module):
            for each in (inner, *(param for param in inner._parameters.values() if param is not None)):
                vars(each).pop("_is_hf_initialized", None)  # the mark of an earlier initialisation, on meta too
            for name in _keys(inner, "all_tied_weights_keys"):
                owner, _, key = name.rpartition(".")
                params = inner.get_submodule(owner)._parameters
                if (param := params.get(key)) is not None:
                    # Both modules initialise a tied weight. What is written to a stand-in on meta is lost.
                    tied.append((params, key, nn.Parameter(torch.empty_like(param, device="meta"))))
        with replacing(*tied):
            cast(Any, module).initialize_weights()
        return True

    def refuse_initialisation(self, model: nn.Module, empty: Collection[str]) -> None:
        """Refuse PEFT's adapters: transformers would initialise them as linear layers, whose update is not zero."""
        for prefix, module in modules_of(model):
            inside = module._modules if "base_layer" in module._modules and is_from(module, "peft") else ()
            for adapter in (join_names(prefix, key) for key in inside if key != "base_layer"):
                if any(name.startswith(f"{adapter}.") for name in empty):
                    what = f"{adapter!r} is an adapter that was made on the meta device, where PEFT initialises nothing"
                    raise ShardingError(f"{what}: let rank 0 make it elsewhere, or call init_weights(model, function)")

    # -- files --------------------------------------------------------------------------------------------------------

    def file_stem(self, model: nn.Module) -> str:
        """The stem of the library's `save_pretrained`."""
        return "diffusion_pytorch_model" if is_model_of(model, "diffusers") else super().file_stem(model)

    def left_out(self, model: nn.Module, tied: Sequence[Sequence[str]]) -> set[str]:
        """The names that `save_pretrained` leaves out (transformers' `remove_tied_weights_from_state_dict`).

        In each group these are the names that the model declares as tied, but never all names. Undeclared names are
        saved: `from_pretrained` does not tie them again, so each needs its values.
        """
        if not is_model_of(model, "transformers"):
            return super().left_out(model, tied)
        modules = model.named_modules()
        patterns = [join_names(prefix, key) for prefix, part in modules for key in _keys(part, "_tied_weights_keys")]
        dropped = _keys(model, "_keys_to_ignore_on_save")
        for names in tied:
            declared = [name for name in sorted(names) if any(re.search(pattern, name) for pattern in patterns)]
            dropped.update(declared if len(declared) < len(names) else declared[:-1])
        return dropped

    def rearrange_for_saving(self, model: nn.Module, tensors: Tensors) -> Tensors:
        """The tensors as `save_pretrained` stores them.

        Raises:
            CheckpointError: the model has adapters or is quantized, or transformers cannot convert its weights.
        """
        _check_exportable(model)
        if not is_model_of(model, "transformers"):
            return tensors
        try:
            loading = importlib.import_module("transformers.core_model_loading")
            return dict(loading.revert_weight_conversion(model, dict(tensors)))
        except Exception as error:  # any error means that the layout on disk is not known
            name = type(model).__name__
            raise CheckpointError(f"transformers cannot convert the weights of {name} for saving: {error}") from error

    def rearrange_for_loading(self, model: nn.Module, stored: Tensors, wanted: Tensors) -> ForLoading:
        """As in ``from_pretrained`` (``convert_and_load_state_dict_in_model`` in transformers/core_model_loading.py).

        Raises:
            CheckpointError: transformers cannot convert these files.
        """
        optional = _keys(model, "_keys_to_ignore_on_save")
        if not is_model_of(model, "transformers"):
            return super().rearrange_for_loading(model, stored, wanted)._replace(optional=optional)
        try:
            loading = importlib.import_module("transformers.core_model_loading")
            mapping = importlib.import_module("transformers.conversion_mapping")
            transforms = mapping.get_model_conversion_mapping(model)
            steps, taken = _steps_of(loading, transforms, model, stored, wanted)
        except Exception as error:  # any error means that the layout of the files is not known
            what = f"transformers cannot convert these files for {type(model).__name__}"
            raise CheckpointError(f"{what}: {error}") from error
        made: dict[str, torch.Tensor] = {}
        failed: dict[str, str] = {}
        for name, step in steps.items():
            try:
                results = step.convert(name, model=model, config=cast(Any, model).config)
            except Exception as error:  # the files may lack a part of the tensor, for example
                failed[name] = f"transformers: {error}"
            else:
                for target, tensors in results.items():
                    if target in wanted:
                        made[target] = tensors[0] if isinstance(tensors, list) else tensors
        # transformers takes names out that a class ignores, such as tables that older versions have saved.
        ignored = types.SimpleNamespace(missing_keys=set(), unexpected_keys=set(stored) - taken)
        cast(Any, model)._adjust_missing_and_unexpected_keys(ignored)
        return ForLoading(made, failed, set(stored) - ignored.unexpected_keys, optional)

    def write_config(self, model: Any, directory: Path, dtype: torch.dtype | None) -> None:
        """Write the files of `save_pretrained` beside the weights: config, generation config, custom models' code."""
        if is_model_of(model, "diffusers"):
            model.save_config(directory)
        if not is_model_of(model, "transformers"):
            return
        config = copy.deepcopy(model.config)  # the model in memory keeps its dtype
        if dtype is not None:
            config.dtype = str(dtype).removeprefix("torch.")
        config.architectures = [type(model).__name__]  # StreamShard's class has the original's name
        if model.is_remote_code():
            save_code = importlib.import_module("transformers.dynamic_module_utils").custom_object_save
            save_code(model, directory, config=config)
        config.save_pretrained(directory)
        if model.can_generate() and getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(directory)


def _check_exportable(model: nn.Module) -> None:
    """Refuse models with adapters, and quantized models: `save_pretrained` writes other tensors than their weights."""
    adapted = next((name for name, module in model.named_modules() if is_from(module, "peft")), None)
    if adapted is not None or getattr(model, "_hf_peft_config_loaded", False):
        what = f"{type(model).__name__} has adapters of PEFT{f' ({adapted!r})' if adapted else ''}"
        how = "shard the PeftModel itself, and let all ranks call model.save_pretrained(directory)"
        raise CheckpointError(f"{what}, whose names nothing loads: {how}")
    if getattr(model, "hf_quantizer", None) is not None:
        raise CheckpointError(f"{type(model).__name__} is quantized; only unquantized weights can be exported")


def _keys(module: nn.Module, attribute: str) -> set[str]:
    """The names or patterns in an attribute of a library's class; empty if there is none."""
    return set(getattr(module, attribute, None) or ())


def _steps_of(
    loading: Any, transforms: Sequence[Any], model: Any, stored: Tensors, wanted: Tensors
) -> tuple[dict[str, Any], set[str]]:
    """The conversions of `stored`, each by the first name that it makes; and the names in `stored` that they need."""
    renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    for_base = (model.base_model_prefix, wanted)  # positional: transformers 5.17 renamed the first
    steps: dict[str, Any] = {}
    taken: set[str] = set()
    for key in sorted(stored, key=loading.dot_natural_key):  # stacks experts by number: 9 before 10
        name, pattern = loading.rename_source_key(key, renamings, converters, *for_base)
        if name not in wanted and key in wanted:  # a renaming must not spoil a name that fits
            name, pattern = loading.rename_source_key(key, [], [], *for_base)
        if name not in wanted:
            continue
        if pattern is None:
            step, pattern = steps.setdefault(name, loading.WeightRenaming(key, name)), key
        else:
            step = steps.setdefault(name, copy.deepcopy(by_pattern[pattern]))  # one for each target
        step.add_tensor(name, key, pattern, stored[key])
        taken.add(key)
    return steps, taken

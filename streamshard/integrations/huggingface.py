"""transformers' and diffusers' rules for a directory of weights: names, tensors that are rearranged, and the config.

Only `builder_of_config` imports transformers: if a model has one of its classes, the user has imported it. Where
possible transformers' own functions decide, so that saved files follow the installed version.
"""

from __future__ import annotations

import copy
import importlib
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from streamshard.errors import CheckpointError, ConfigError
from streamshard.planning.structure import join_names, modules_inside, modules_of, params_of


def builder_of_config(path: Path) -> Callable[[], nn.Module]:
    """A function that builds the model of a ``config.json``, without weights.

    Raises:
        ConfigError: there is no such file, or transformers is not installed, cannot read it, or has no such
            architecture.
    """
    if not path.exists():
        raise ConfigError(f"{path.parent} has no {path.name}")
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"{path} is read by transformers, which is not installed: pip install transformers"
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        name = (config.architectures or [None])[0]
        kind: Any = transformers.AutoModelForCausalLM.from_config if name is None else getattr(transformers, name)
    except Exception as error:  # transformers raises many classes
        what = str(error).partition("\n")[0]
        raise ConfigError(f"{path}: {what}") from error
    return lambda: cast(nn.Module, kind(copy.deepcopy(config)))


def is_transformers_model(model: nn.Module) -> bool:
    """Whether `model` is of a transformers class."""
    # To ask transformers itself for the class would import it.
    modeling_utils = sys.modules.get("transformers.modeling_utils")
    return modeling_utils is not None and isinstance(model, modeling_utils.PreTrainedModel)


def is_diffusers_model(model: nn.Module) -> bool:
    """Whether `model` is of a diffusers class."""
    modeling_utils = sys.modules.get("diffusers.models.modeling_utils")
    return modeling_utils is not None and isinstance(model, modeling_utils.ModelMixin)


def stem_of_files(model: nn.Module) -> str:
    """How the names of files of weights begin, as `save_pretrained` of the model's library names them."""
    return "diffusion_pytorch_model" if is_diffusers_model(model) else "model"


def check_exportable(model: nn.Module) -> None:
    """Refuse models for which `save_pretrained` writes something other than the model's own weights.

    Raises:
        CheckpointError: the model carries adapters or is quantized.
    """
    adapted = next((name for name, module in model.named_modules() if is_of("peft", module)), None)
    if adapted is not None or getattr(model, "_hf_peft_config_loaded", False):
        raise CheckpointError(
            f"{type(model).__name__} has adapters of PEFT{f' ({adapted!r})' if adapted else ''}: nothing loads its "
            "weights under their names. To save the adapters shard the PeftModel itself, and let all ranks call "
            "model.save_pretrained(directory). For merged weights load those without sharding, and call "
            "merge_and_unload()"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise CheckpointError(f"{type(model).__name__} is quantized; only unquantized weights can be exported")


def kept_in_fp32(root: nn.Module, dtype: torch.dtype | None) -> set[str]:
    """Names of parameters that transformers' models inside `root` keep in fp32 when they are loaded as `dtype`."""
    names: set[str] = set()
    for prefix, module in modules_of(root):
        if dtype is None or not is_transformers_model(module):
            continue
        globs = cast(Any, module)._get_dtype_plan(dtype)
        if globs:
            pattern = re.compile("|".join(glob.replace("*", ".*") for glob in globs))  # searched for, as there
            names.update(join_names(prefix, name) for name in params_of(module) if pattern.search(name))
    return names


def tie_weights(root: nn.Module) -> None:
    """Let transformers' models inside `root` tie their weights: ``accelerate.init_empty_weights`` unties some."""
    for module in modules_inside(root):
        if is_transformers_model(module):
            cast(Any, module).tie_weights()


def initialise(model: nn.Module) -> None:
    """Let the transformers model `model` initialise itself. Tied names get the values of their partners."""
    tied: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    for module in modules_inside(model):
        for each in (module, *(param for param in module._parameters.values() if param is not None)):
            vars(each).pop("_is_hf_initialized", None)  # the mark of an earlier initialisation, on meta too
        for name in getattr(module, "all_tied_weights_keys", None) or () if is_transformers_model(module) else ():
            owner, _, key = name.rpartition(".")
            params = module.get_submodule(owner)._parameters
            if (param := params.get(key)) is not None:
                tied.append((params, key, param))
    try:
        for params, key, param in tied:
            params[key] = nn.Parameter(torch.empty_like(param, device="meta"))
        cast(Any, model).initialize_weights()
    finally:
        for params, key, param in tied:
            params[key] = param


def adapters_in(module: nn.Module) -> list[str]:
    """Names of the modules that PEFT has added inside a layer."""
    if "base_layer" not in module._modules or not is_of("peft", module):
        return []
    return [name for name in module._modules if name != "base_layer"]


def is_of(library: str, module: nn.Module) -> bool:
    """Whether `module` is of a class that `library` defines, or of a subclass."""
    return any(each.__module__.partition(".")[0] == library for each in type(module).__mro__)


def drop_tied_names(model: nn.Module, tied: Sequence[Sequence[str]]) -> set[str]:
    """The names `save_pretrained` leaves out (transformers/modeling_utils.py, `remove_tied_weights_from_state_dict`).

    Args:
        model: says in `_tied_weights_keys` which names are copies of others.
        tied: groups of names; each group names one parameter.

    Returns:
        In each group, the names that are declared as copies, but never all names. Names that are tied without being
        declared are kept: `from_pretrained` would not tie them again, so each needs its values.
    """
    patterns = [
        join_names(prefix, key)
        for prefix, module in model.named_modules()
        for key in getattr(module, "_tied_weights_keys", None) or ()
    ]
    dropped: set[str] = set()
    for names in tied:
        declared = [name for name in sorted(names) if any(re.search(pattern, name) for pattern in patterns)]
        dropped.update(declared if len(declared) < len(names) else declared[:-1])
    return dropped


def ignored_on_save(model: nn.Module) -> set[str]:
    """Names that the model's class does not save."""
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


def ignored_on_load(model: nn.Module, names: Sequence[str]) -> set[str]:
    """Names among `names` that the model's class ignores if the files have them and the model does not."""
    adjust = getattr(model, "_adjust_missing_and_unexpected_keys", None)
    if callable(adjust) and is_transformers_model(model):
        told = types.SimpleNamespace(missing_keys=set(), unexpected_keys=set(names))
        adjust(told)
        return set(names).difference(told.unexpected_keys)
    return set()


def rearrange_for_saving(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with names, shapes and order as `save_pretrained` stores them.

    Args:
        model: the model; its own tensors are not touched.
        tensors: meta tensors in state dict order, unsharded shapes.

    Raises:
        CheckpointError: transformers cannot do it.
    """
    try:
        loading = importlib.import_module("transformers.core_model_loading")
        return dict(loading.revert_weight_conversion(_Unsharded(model, tensors), dict(tensors)))
    except Exception as error:  # any error means that the layout on disk is not known
        name = type(model).__name__
        raise CheckpointError(f"transformers cannot convert the weights of {name} for saving: {error}") from error


class ForLoading(NamedTuple):
    """How transformers makes the model's tensors from those in files.

    Attributes:
        made: by the model's name.
        failed: by the model's name, why it cannot be made from the files' tensors.
        used: names of the files' tensors that are needed.
    """

    made: dict[str, torch.Tensor]
    failed: dict[str, str]
    used: set[str]


def rearrange_for_loading(
    model: nn.Module, stored: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
) -> ForLoading:
    """Make the model's tensors from those in files, as ``from_pretrained`` does.

    Follows ``convert_and_load_state_dict_in_model`` in transformers/core_model_loading.py, without loading.

    Args:
        model: the model; its own tensors are not touched.
        stored: meta tensors by the names in the files.
        wanted: meta tensors of the model's names and shapes.

    Raises:
        CheckpointError: transformers does not say how.
    """
    try:
        loading = importlib.import_module("transformers.core_model_loading")
        mapping = importlib.import_module("transformers.conversion_mapping")
        transforms = mapping.get_model_conversion_mapping(model)
        steps, used = _steps_of(loading, transforms, model, stored, wanted)
    except Exception as error:  # any error means that nobody knows what the files hold
        raise CheckpointError(
            f"transformers cannot say what these files are for {type(model).__name__}: {error}"
        ) from error
    made: dict[str, torch.Tensor] = {}
    failed: dict[str, str] = {}
    for name, step in steps.items():
        try:
            results = step.convert(name, model=_Unsharded(model, wanted), config=cast(Any, model).config)
        except Exception as error:  # of a part that the files do not have, for example
            failed[name] = f"transformers: {error}"
        else:
            for target, tensors in results.items():
                if target in wanted:
                    made[target] = tensors[0] if isinstance(tensors, list) else tensors
    return ForLoading(made, failed, used)


def _steps_of(
    loading: Any,
    transforms: Sequence[Any],
    model: Any,
    stored: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
) -> tuple[dict[str, Any], set[str]]:
    """By the first name that each step makes: the step, and the tensors of `stored` that it needs."""
    renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    for_base = (model.base_model_prefix, wanted)  # by place: the first had another name before transformers 5.17
    steps: dict[str, Any] = {}
    used: set[str] = set()
    for key in sorted(stored, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(key, renamings, converters, *for_base)
        if name not in wanted and key in wanted:
            name, pattern = loading.rename_source_key(key, [], [], *for_base)
        if name not in wanted:
            continue
        if pattern is None:
            step, pattern = steps.setdefault(name, loading.WeightRenaming(key, name)), key
        else:
            step = steps.setdefault(name, copy.deepcopy(by_pattern[pattern]))
        step.add_tensor(name, key, pattern, stored[key])
        used.add(key)
    return steps, used


def write_config(model: Any, directory: Path, dtype: torch.dtype | None) -> None:
    """Write what `save_pretrained` writes beside the weights: config, generation config, code of custom models.

    Args:
        model: a transformers model.
        directory: the destination.
        dtype: of the model on disk, for the config; None leaves what the config says.
    """
    config = copy.deepcopy(model.config)
    if dtype is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    if model.is_remote_code():
        importlib.import_module("transformers.dynamic_module_utils").custom_object_save(model, directory, config=config)
    config.save_pretrained(directory)
    if model.can_generate() and getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(directory)


class _Unsharded:
    """A model for transformers' conversions: the same, except that parameters have their full shapes."""

    def __init__(self, model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        self._model = model
        self._tensors = tensors

    def get_parameter(self, name: str) -> torch.Tensor:
        """A meta tensor in place of the parameter."""
        if name not in self._tensors:
            raise AttributeError(f"the model has no parameter {name!r}")
        return self._tensors[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

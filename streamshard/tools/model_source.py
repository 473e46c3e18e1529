"""The model that a command's argument names."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

from torch import nn

from streamshard.errors import ConfigError


def builder_of(source: str) -> Callable[..., nn.Module]:
    """A function that builds a model.

    Args:
        source: path of a transformers ``config.json``, or of its directory; the name of a model of the hub whose
            ``config.json`` is in the cache of huggingface_hub; or the name of a function whose only argument, if it has
            one, is the mesh of its DTensors: ``package.module:function``. The current directory is searched for the
            module too.

    Raises:
        ConfigError: there is no such file or function, or transformers does not know the architecture.
    """
    module, colon, name = source.partition(":")
    if os.path.exists(source) or not colon:
        from streamshard.integrations.huggingface import builder_of_config  # only here: see `conventions`

        return builder_of_config(_config_of(source))
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        build = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{source!r}: {error}") from error
    return cast(Callable[..., nn.Module], build)


def _config_of(source: str) -> Path:
    """The ``config.json`` of a path, or of a model of the hub in the cache. Downloads nothing."""
    if os.path.exists(source):
        return Path(source, "config.json") if os.path.isdir(source) else Path(source)
    wanted = "a config.json, its directory, or function package.module:function"
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) or source.endswith(".json"):
        raise ConfigError(f"no file or directory {source!r}: wanted {wanted}")
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(source, "config.json")
    except (ImportError, ValueError):  # not installed; not a name of the hub
        found = None
    if not isinstance(found, str):
        raise ConfigError(
            f"no file or directory {source!r}, and the cache of huggingface_hub has no config.json of such a model: "
            f"fetch it (hf download {source} config.json), or name {wanted}"
        )
    return Path(found)

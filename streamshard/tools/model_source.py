"""The model that a command's argument names."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import cast

from torch import nn

from streamshard.errors import ConfigError

_WANTED = (
    "wanted a config.json, its directory, a hub name in the cache (hf download NAME config.json), or "
    "package.module:function"
)


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

        try:
            return builder_of_config(source)
        except ConfigError as error:
            if os.path.exists(source):
                raise
            raise ConfigError(f"{_WANTED}: {error}") from error
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        build = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{source!r}: {error}") from error
    return cast(Callable[..., nn.Module], build)

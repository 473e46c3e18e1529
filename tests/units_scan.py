"""Which units StreamShard finds in a model of transformers, from its default configuration on meta."""

from __future__ import annotations

import importlib
import warnings
from collections import Counter
from typing import Any, NamedTuple

import torch

from streamshard.integrations import huggingface
from streamshard.plan.discovery import embedding_params, find_groups
from streamshard.plan.structure import params_of, tie_on_meta


class Found(NamedTuple):
    """What becomes of one model.

    Attributes:
        share: of the weights that are no embeddings', what is in the root unit.
        layers: how many units stream, by the class of their layer.
        heard: the warnings.
    """

    share: float
    layers: dict[str, int]
    heard: list[str]


def look_at(name: str) -> Found:
    """What is found in the model of that class."""
    kind: Any = getattr(importlib.import_module("transformers"), name)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers'
        model = kind(kind.config_class())
        huggingface.tie_weights(model)
    tie_on_meta(model)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        units, groups = find_groups(model, None)
    embeddings = embedding_params(model)
    root = {each.param for each in groups[0]} - embeddings
    weights = set(params_of(model).values()) - embeddings
    return Found(
        sum(param.numel() for param in root) / sum(param.numel() for param in weights),
        dict(Counter(type(unit.modules[0]).__name__ for unit in units if not unit.is_resident)),
        [str(each.message) for each in heard],
    )

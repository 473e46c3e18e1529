"""Which units StreamShard finds in the models of transformers' auto classes, from default configurations on meta.

By hand, in some minutes: ``python -m tests.units_scan units.md`` writes the table. With names of classes
behind the path only these are looked at.
"""

from __future__ import annotations

import argparse
import importlib
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from streamshard.errors import StreamShardError
from streamshard.integrations import huggingface
from streamshard.plan.discovery import embedding_params, find_groups
from streamshard.plan.structure import params_of, tie_on_meta

__all__ = ["Found", "class_names", "look_at"]

MAPPINGS = ("", "_FOR_CAUSAL_LM", "_FOR_SEQ_TO_SEQ_CAUSAL_LM", "_FOR_IMAGE_TEXT_TO_TEXT", "_FOR_MASKED_LM") + (
    ("_FOR_SPEECH_SEQ_2_SEQ", "_FOR_MULTIMODAL_LM", "_FOR_PRETRAINING")  # of the auto classes' modules
)


class Found(NamedTuple):
    """What becomes of one model.

    Attributes:
        numel: its parameters.
        weights: those that are no embeddings'.
        outside: of these, those in the root unit.
        layers: how many units take turns, by the class of their layer.
        largest: parameters of the largest of them.
        large: how many units stay.
        heard: what the user is warned of.
    """

    numel: int
    weights: int
    outside: int
    layers: dict[str, int]
    largest: int
    large: int
    heard: list[str]

    @property
    def share(self) -> float:
        """Of the weights, what is in the root unit."""
        return self.outside / max(self.weights, 1)


def class_names() -> list[str]:
    """All models of the auto classes' `MAPPINGS`."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    names: set[str] = set()
    for mapping in MAPPINGS:
        for name in getattr(auto, f"MODEL{mapping}_MAPPING_NAMES").values():
            names.update([name] if isinstance(name, str) else name)
    return sorted(names)


def look_at(name: str, **sizes: Any) -> Found:
    """What is found in the model of that class, of its default configuration but for `sizes`."""
    kind: Any = getattr(importlib.import_module("transformers"), name)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers'
        model = kind(kind.config_class(**sizes))
        huggingface.tie_weights(model)
    tie_on_meta(model)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        units, groups = find_groups(model, None)
    embeddings = embedding_params(model)
    edge = {each.param for each in groups[0]}
    turns = [(unit, group) for unit, group in zip(units, groups[1:], strict=True) if not unit.is_resident]
    sizes_of = [sum(each.param.numel() for each in group) for _, group in turns]
    params = set(params_of(model).values())
    return Found(
        sum(param.numel() for param in params),
        sum(param.numel() for param in params - embeddings),
        sum(param.numel() for param in edge - embeddings),
        dict(Counter(type(unit.modules[0]).__name__ for unit, _ in turns)),
        max(sizes_of, default=0),
        len(units) - len(turns),
        [str(each.message) for each in heard],
    )


def _millions(numel: int) -> str:
    return f"{numel / 1e6:,.0f}" if numel >= 1e7 else f"{numel / 1e6:.1f}"


def _row(name: str, found: Found) -> str:
    layers = ", ".join(f"{count} {kind}" for kind, count in found.layers.items()) or "none"
    sizes = (_millions(numel) for numel in (found.numel, found.weights, found.largest))
    outside = f"{found.share:.1%}" + (", warns" if found.heard else "")
    return f"| {name} | {' | '.join(sizes)} | {layers} | {found.large} | {outside} |"


PAGE = """\
# Units of transformers' models

Written by `python -m tests.units_scan`, transformers {version}: models of the auto classes (base, causal, masked and
sequence-to-sequence language models, image and text, speech, several modalities, pretraining) from their default
configurations, on the meta device.

{count} models. In {tenth} of them more than a tenth of the weights other than embeddings are in the root unit;
in {warned} the user is warned, because it is more than a quarter or no layers repeat. For {failed} more there is no
model: they are listed below the others.

Parameters are in millions, first all of them, then without embeddings. *Largest* is the largest unit that takes turns;
*stay* says how many units stay (embeddings, heads and other large modules); *edge* is the share of the weights,
embeddings not counted, in the root unit.

| class | all | weights | largest | layers | stay | edge |
| --- | ---: | ---: | ---: | --- | ---: | ---: |
"""


def _page(found: dict[str, Found], failed: dict[str, str], version: str) -> str:
    counts = {
        "count": len(found),
        "tenth": sum(each.share > 0.1 for each in found.values()),
        "warned": sum(bool(each.heard) for each in found.values()),
        "failed": len(failed),
    }
    rows = [_row(name, each) for name, each in found.items()]
    rows += ["", "## Not made", "", "| class | why |", "| --- | --- |"]
    rows += [f"| {name} | {why} |" for name, why in failed.items()]
    return PAGE.format(version=version, **counts) + "\n".join(rows) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Look at all classes, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="the page to write")
    parser.add_argument("classes", nargs="*", help="of transformers; all of the auto classes by default")
    given = parser.parse_args(arguments)
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    found: dict[str, Found] = {}
    failed: dict[str, str] = {}
    for name in given.classes or class_names():
        try:
            found[name] = look_at(name)
        except StreamShardError:
            raise
        except Exception as error:  # whatever a configuration lacks
            text = " ".join(str(error).split()).replace("|", "/")
            failed[name] = f"{type(error).__name__}: {text[:90]}{'..' if len(text) > 90 else ''}"
    given.path.write_text(_page(found, failed, transformers.__version__))
    print(f"{given.path}: {len(found)} models, {len(failed)} not made")


if __name__ == "__main__":
    main()

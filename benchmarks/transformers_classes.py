"""Every model class of transformers' auto classes: under StreamShard it trains as without, or it is refused by name.

    python benchmarks/transformers_classes.py [--only PART ..] [--ranks 2] [--every] [--out FILE]

Each class is built tiny from its configuration. Ranks train it three steps in fp32, the second with gradient
checkpointing if the class has it, then evaluate one batch and generate two tokens if it can: first in plain PyTorch
with the mean of the ranks' gradients, as DistributedDataParallel has it, then under `StreamShard(model)`. Ranks have
batches and random numbers of their own.

Outcomes: ``equal`` (losses, weights, outputs and tokens, up to rounding), ``refused`` (a StreamShardError; the place
and the message follow), ``no plain`` (this configuration and these inputs do not train without StreamShard either, or
rounding alone changes the result). Anything else is WRONG, and the exit code counts those.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import importlib
import inspect
import io
import itertools
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from streamshard import Precision, StreamShard, StreamShardError
from streamshard.errors import CommunicationError

MAPPINGS = (
    *("_FOR_CAUSAL_LM", "_FOR_SEQ_TO_SEQ_CAUSAL_LM", "_FOR_MASKED_LM", "_FOR_IMAGE_TEXT_TO_TEXT", "_FOR_MULTIMODAL_LM"),
    *("_FOR_SPEECH_SEQ_2_SEQ", "_FOR_CTC", "_FOR_RNNT", "_FOR_TDT", "_FOR_IMAGE_CLASSIFICATION", "_FOR_RETRIEVAL"),
    *("_FOR_OBJECT_DETECTION", "_FOR_UNIVERSAL_SEGMENTATION", "_FOR_SEMANTIC_SEGMENTATION", "_FOR_DEPTH_ESTIMATION"),
    *("_FOR_TIME_SERIES_PREDICTION", "_FOR_VIDEO_CLASSIFICATION", "_FOR_AUDIO_CLASSIFICATION", "_FOR_IMAGE_TO_IMAGE"),
    *("_FOR_TEXT_TO_SPECTROGRAM", "_FOR_TEXT_TO_WAVEFORM", "_FOR_MASK_GENERATION", "_FOR_SEQUENCE_CLASSIFICATION"),
    *("_FOR_PRETRAINING", ""),  # of these, those of families that the others do not have
)
STEPS, CASE_S, LARGEST, CLOSE = 3, 90, 8_000_000, 2e-3
WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH = 32, 4, 3, 99, 8
SIZES: tuple[tuple[str, int | None], ...] = (  # the most that an integer is, by the first pattern found in its name
    (r"num_channels|audio_channels|in_chans|num_labels|type_vocab|_bits$|_step$|_rate$|hop_length|n_fft|period", None),
    (r"mel|feature_projection_input_dim|feature_size|input_feat|num_bins|_classes|n_words|_stride$|^stride", None),
    (r"kernel|n_langs|offset", None),
    (r"n_group$|topk_group|n_groups$", 1),
    (r"_per_tok|top_?k|moe_k$|num_selects|window_size|depths?$", 2),
    (r"(kv|key_value|global|group).*heads$|n_kv_heads", 2),
    (r"experts$|num_groups|num_frames|frames_per_clip", 4),
    (r"heads?$|heads_per_stage|rotary_dim", HEADS),
    (r"codebook_size", 64),
    (r"vocab_size|vocabulary_size|num_embeddings$|padding_idx", VOCABULARY),
    (r"max_.*positions?(_embeddings)?$|n_positions|n_ctx|context_length|max_seq|max_target|max_length", 64),
    (r"layers$|layer$|blocks$|num_.*_layers", LAYERS),  # one more than slots
    (r"head_dim|head_size|d_kv$|dim_head|d_head", WIDTH // HEADS),
    (r"queries$|num_query|num_latents", 8),
    (r"image_size|img_size|input_size", 32),
    (r"patch_size", 8),
    (r"window", 4),
    (r"rank$|latent", 16),
    (r"intermediate|ffn|d_ff|inner|mlp_dim|feedforward|feed_forward", 64),
    (r"hidden|dim|d_model|embd|embed|width|channels|filters|units$|_size$|size$|d_", WIDTH),
)
TOKEN = r"(token|start|end|pad|bos|eos|sep|mask)_?(token)?_(id|index)$|_token_id(?!s)|_token_index|image_token$"
DERIVED = "(v_|qk_)?head_dim|num_key_value_heads|intermediate_size|hidden_size|.*_dim|stage_names|num_layers"
MELS = ("feature_projection_input_dim", "num_mel_bins", "input_feat_per_channel", "feature_size")
IMAGE_TOKEN = ("image_token_id", "image_token_index")
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_d_ssm": 64}
SWIN = {"image_size": 64, "patch_size": 4, "window_size": 4, "depths": [2, 2], "num_heads": [2, 4]}
STAGES = ["stage2", "stage3", "stage4"]
RESNET = {"embedding_size": 8, "hidden_sizes": [8] * 4, "depths": [1] * 4, "out_features": STAGES}
OVERRIDES: dict[str, dict[str, Any]] = {  # of configurations whose name begins so, where they have it
    "Bamba": MAMBA | {"attn_layer_indices": [1]},
    "GraniteMoeHybrid": MAMBA | {"layer_types": ["mamba", "attention", "mamba"]},
    "Blenderbot": {"decoder_layers": 2},
    "FalconH1": MAMBA,
    "NemotronH": MAMBA,
    "Mamba2": {"head_dim": 16},
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "Lfm2Moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "GPTNeo": {"attention_types": [[["global", "local", "global"], 1]]},
    "Xmod": {"default_language": "en_XX"},
    "Reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [2, 4], "is_decoder": True},
    "Esm": {"pad_token_id": 1, "mask_token_id": 2},
    "Swin": SWIN,
    "DonutSwin": SWIN,
    "Chameleon": {"vocabulary_map": {"<image>": 60}},
    "Emu3": {"vocabulary_map": {"<image>": 60}},
}
TOKENS: dict[str, int] = {}


class NoPlain(Exception):
    """Plain PyTorch does not train the class from this configuration and these inputs."""


def class_names(*, every: bool) -> list[str]:
    """Classes of `MAPPINGS`; those of the last ones only of families without another, unless `every`."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    families: dict[str, set[str]] = {}
    for place, mapping in enumerate(MAPPINGS):
        for family, names in getattr(auto, f"MODEL{mapping}_MAPPING_NAMES").items():
            if every or place < len(MAPPINGS) - 3 or not families.get(family):
                families.setdefault(family, set()).update([names] if isinstance(names, str) else names)
    return sorted(set().union(*families.values()))


# -- tiny models ------------------------------------------------------------------------------------------------------


def shrink(name: str, value: Any, lists: set[int]) -> Any:
    """What a tiny model has in the place of a value; `lists` are numbers of layers, of which there are lists."""
    if isinstance(value, dict):
        if "rope_theta" in value:
            half = int(WIDTH // HEADS * (value.get("partial_rotary_factor") or 1)) // 2
            value = {**value, "mrope_section": [half - half // 4 * 2, half // 4, half // 4]}
        pairs = [1.0] * (WIDTH // HEADS // 2)
        value = {key: pairs if key in ("short_factor", "long_factor") else each for key, each in value.items()}
        return value if "label" in name else {key: shrink(str(key), each, lists) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        if len(value) in lists and len(value) > 4 and all(isinstance(each, (str, int, float)) for each in value):
            return [*dict.fromkeys(value), value[-1], value[-1]][:LAYERS]
        return [shrink(name, each, lists) for each in value]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if re.search(TOKEN, name):
        return value if value < 5 else TOKENS.setdefault(name, 60 + len(TOKENS) % 38)
    most = next((size for pattern, size in SIZES if re.search(pattern, name)), None)
    if most == HEADS:
        return next((each for each in (4, 2, 1) if each <= value), value)
    return value if most is None else min(value, most)


def tiny_values(config: Any) -> dict[str, Any]:
    """What a configuration's class makes a tiny one of."""
    held = vars(config)
    takes = inspect.signature(type(config).__init__).parameters
    lists = {value for key, value in held.items() if re.search(r"layers?$|depth$", key) and isinstance(value, int)}
    values: dict[str, Any] = {}
    for name, taken in takes.items():
        value = held.get(name)
        if name.startswith("_") or name in ("self", "dtype", "transformers_version", "architectures") or value is None:
            continue
        if type(value).__name__ == "TimmBackboneConfig":
            values[name] = importlib.import_module("transformers").ResNetConfig(**RESNET)  # timm may not be installed
        elif hasattr(value, "to_dict"):
            values[name] = tiny_config(value)
        elif taken.default is not None or not re.fullmatch(DERIVED, name):
            values[name] = shrink(name, value, lists)  # what the class itself derives is left to it
    for name in takes:
        heads = name.replace("key_value", "attention")
        if "num_key_value_heads" in name and heads in values and held.get(name) in (None, held[heads]):
            values[name] = values[heads]
    for name, value in {"head_dim": WIDTH // HEADS, "vocab_size": VOCABULARY, "num_experts_per_tok": 2}.items():
        if name in takes and held.get(name) is None:
            values[name] = value
    return values


def tiny_config(config: Any) -> Any:
    """The same of a configuration and those inside."""
    values = tiny_values(config)
    for name, override in OVERRIDES.items():
        if re.match(rf"{name}(Text|Vision)?Config", type(config).__name__):
            values.update({key: value for key, value in override.items() if hasattr(config, key)})
    return type(config)(**values)


def build(name: str) -> Any:
    """The tiny model of that class, always the same."""
    try:
        kind = getattr(importlib.import_module("transformers"), name)
        config = tiny_config(kind.config_class())
        with torch.device("meta"), contextlib.suppress(Exception):
            numel = sum(param.numel() for param in kind(copy.deepcopy(config)).parameters())
            if numel > LARGEST:
                config = None
        if config is None:
            raise NoPlain(f"{numel:,} parameters are too many")
        seed(0)
        return kind(config).float()
    except (Exception, SystemExit) as error:
        raise error if isinstance(error, NoPlain) else NoPlain(f"not built: {one_line(error)}") from None


def seed(number: int) -> None:
    """All random numbers that models use."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def one_line(error: BaseException) -> str:
    """An error's class and message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# -- inputs -----------------------------------------------------------------------------------------------------------

KINDS = {  # of inputs, by what forward has to take; numbers are of placeholders of an image's patches
    "text image": ("input_ids", "pixel_values"),
    **{f"text image {count}": ("input_ids", "pixel_values") for count in (16, 4, 17, 1, 8, 9, 2)},
    "text patches": ("input_ids", "pixel_values", "image_grid_thw"),
    "spectrum decoder": ("input_features", "decoder_input_ids"),
    "rows decoder": ("input_features", "decoder_input_ids"),
    "wave decoder": ("input_values", "decoder_input_ids"),
    "image decoder": ("pixel_values", "decoder_input_ids"),
    "text decoder": ("input_ids", "decoder_input_ids"),
    "text boxes": ("input_ids", "bbox"),
    "text": ("input_ids",),
    "image prompt": ("pixel_values", "input_points"),
    "image": ("pixel_values",),
    "video": ("pixel_values",),
    "clip": ("pixel_values_videos",),
    "patches": ("hidden_states", "grid_thw"),
    "patches of pixels": ("pixel_values", "grid_thw"),
    "spectrum": ("input_features",),
    "rows": ("input_features",),
    "wave": ("input_values",),
    "channel": ("input_values",),
    "rows as values": ("input_values",),
    "series": ("past_values",),
}


def of(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these that a configuration, or one inside of it, has."""
    inside = [value for value in vars(config).values() if hasattr(value, "to_dict")]
    for name in names:
        for each in (config, *inside):
            if (value := vars(each).get(name)) is not None:
                return value
    return default


def make_batch(model: Any, inputs: str, labels: str, number: int) -> dict[str, Any]:
    """Two rows of `inputs` with `labels`; of equal numbers equal ones."""
    source = torch.Generator().manual_seed(number)
    config, takes, batch = model.config, inspect.signature(model.forward).parameters, {}

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source)

    def randint(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=source)

    def text(*placeholders: int) -> None:
        nonlocal ids
        ids = torch.cat([ids[:, :3], torch.tensor(placeholders).long().expand(2, -1), ids[:, 3:]], 1)
        batch.update(input_ids=ids, attention_mask=torch.ones_like(ids), token_type_ids=torch.zeros_like(ids))

    size, image = of(config, "image_size", "crop_size", default=64), of(config, *IMAGE_TOKEN, default=4)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels, mels = of(config, "num_channels", default=3), of(config, *MELS, default=80)
    ids = randint(5, 50, 2, LENGTH)
    values = "input_values" if "values" in inputs else "input_features"
    for word in inputs.split(" as ")[0].split():
        if word == "text":
            text()
        elif word.isdigit():
            text(*[image] * int(word))
        elif word == "decoder":
            batch["decoder_input_ids"] = ids.clone()
        elif word == "boxes":
            batch["bbox"] = torch.tensor([1, 2, 5, 6]).expand(2, LENGTH, 4).clone()
        elif word == "image":
            batch["pixel_values"] = randn(2, channels, height, width)
        elif word == "patches":
            merge, frames = of(config, "spatial_merge_size", default=2), of(config, "temporal_patch_size", default=1)
            row = (
                of(config, "in_channels", "num_channels", default=3) * of(config, "patch_size", default=8) ** 2 * frames
            )
            pixels, grid = randn(4 * merge**2, row), torch.tensor([[1, 2 * merge, merge]] * 2)
            batch.update(hidden_states=pixels, pixel_values=pixels, grid_thw=grid, image_grid_thw=grid)
            if "input_ids" in takes:
                text(of(config, "vision_start_token_id", default=3), image, image)
                batch["mm_token_type_ids"] = (ids == image).int()
        elif word in ("video", "clip"):
            name = "pixel_values" if word == "video" else "pixel_values_videos"
            batch[name] = randn(2, of(config, "num_frames", "frames_per_clip", default=2), channels, height, width)
        elif word == "spectrum":
            batch["input_features"] = randn(2, mels, 128)
        elif word == "rows":
            batch[values] = randn(2, of(config, "max_length", default=64) if "values" in inputs else 64, mels)
        elif word in ("wave", "channel"):
            batch["input_values"] = randn(2, 3200) if word == "wave" else randn(2, 1, 3200)
        elif word == "series":
            columns = of(config, "num_input_channels", default=1)
            batch["past_values"] = randn(2, of(config, "context_length", default=16), columns)
            batch["future_values"] = randn(2, of(config, "prediction_length", default=8), columns)
        elif word == "prompt":
            batch["input_points"] = torch.rand(2, 1, 1, 2, generator=source) * 16
    if labels in ("ids", "class", "pixels"):
        batch["labels"] = {"ids": ids, "class": randint(0, 2, 2), "pixels": randint(0, 2, 2, height, width)}[labels]
    elif labels == "boxes":
        masks = randint(0, 2, 2, 2, height, width).float()
        each = [{"class_labels": randint(0, 2, 2), "boxes": torch.rand(2, 4, generator=source) / 4 + 0.3} for _ in "12"]
        batch["labels"] = [{**one, "masks": mask} for one, mask in zip(each, masks, strict=True)]
    elif labels == "masks":
        batch["mask_labels"] = list(randint(0, 2, 2, 2, height, width).float())
        batch["class_labels"] = list(randint(0, 2, 2, 2))
    elif labels == "return_loss":
        batch["return_loss"] = True
    is_open = any(each.kind is each.VAR_KEYWORD for each in takes.values())
    needed = (*KINDS[inputs], "mm_token_type_ids", "labels")
    return {key: value for key, value in batch.items() if key in takes or (is_open and key in needed)}


def kinds_of_labels(name: str, takes: Any) -> Iterator[str]:
    """Those to try for a class, ``none`` last."""
    if "labels" in takes:
        by_name = {"Detection": "boxes", "Classification": "class", "Semantic": "pixels", "": "ids class boxes pixels"}
        yield from next(kinds for part, kinds in by_name.items() if part in name).split()
    elif "mask_labels" in takes:
        yield "masks"
    elif "return_loss" in takes:
        yield "return_loss"
    yield "none"


def loss_of(output: Any) -> torch.Tensor:
    """The model's, or the mean of the squares of its first output that has a gradient."""
    loss = output.get("loss") if isinstance(output, dict) else None
    if loss is not None:
        return loss.sum()
    for each in tree_leaves(output):
        if isinstance(each, torch.Tensor) and each.is_floating_point() and each.requires_grad:
            return each.square().mean()
    raise NoPlain("no output has a gradient")


class Case(NamedTuple):
    """How plain PyTorch trains a class."""

    name: str
    inputs: str
    labels: str


def make_case(name: str) -> Case:
    """The first kinds of inputs and labels that one step runs with."""
    model = build(name)
    takes = inspect.signature(model.forward).parameters
    why: list[str] = []
    for inputs in [kind for kind, wanted in KINDS.items() if set(wanted) <= set(takes)]:
        fitting: Case | None = None
        before = len(why)
        first, *others = kinds_of_labels(name, takes)
        for labels in dict.fromkeys([first, "none", *others]):
            if len(why) - before > 1 and fitting is None:
                break  # not the labels are in the way
            try:
                seed(1)
                model.train().zero_grad()
                loss = loss_of(model(**make_batch(model, inputs, labels, 0)))
                loss.backward()
                norm = sum(param.grad.norm() for param in model.parameters() if param.grad is not None)
                if not 0 < norm < 1e6 or not loss.isfinite():
                    raise NoPlain(f"loss {loss:.1e}, gradients' norm {norm:.1e}")
                fitting = Case(name, inputs, labels)
                if labels != "none" or not others:
                    return fitting
            except Exception as error:
                why.append(f"{inputs}, {labels}: {one_line(error)[:200]}")
        if fitting:
            return fitting
    raise NoPlain("; ".join(why) or f"forward takes {', '.join(list(takes)[:6])}")


# -- training ---------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """What training on one rank leaves; `tokens` are generated."""

    losses: list[torch.Tensor]
    weights: dict[str, torch.Tensor]
    outputs: list[torch.Tensor]
    tokens: torch.Tensor | None


def train(case: Case, place: list[str], without: str = "", *, sharded: bool, noise: float = 0.0) -> Result:
    """Train, evaluate and generate, but for what it is to go without; `place` is told where it is."""
    place[:] = ["StreamShard(model)"]
    model = build(case.name)
    params: list[nn.Parameter] = [param for param in model.parameters() if param.requires_grad]
    if sharded:
        model = StreamShard(model, precision=Precision(param_dtype=torch.float32))
    rank, losses = dist.get_rank(), []
    has_checkpointing = model.supports_gradient_checkpointing and "checkpointing" not in without
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    model.train()
    for step in range(STEPS):
        place[:] = [f"step {step + 1}"]
        if step == 1 and has_checkpointing:
            place[:] = ["step 2, with gradient checkpointing"]
            model.gradient_checkpointing_enable()
        seed(10 * step + rank)
        if not sharded:
            _take_buffers(model)
        loss = loss_of(model(**make_batch(model, case.inputs, case.labels, 10 * step + rank)))
        loss.backward()
        losses.append(loss.detach().clone())
        if not sharded:
            _average(params, noise)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and has_checkpointing:
            model.gradient_checkpointing_disable()
    place[:] = ["evaluation"]
    model.eval()
    seed(rank)
    if not sharded:
        _take_buffers(model)
    batch = make_batch(model, case.inputs, case.labels, 90 + rank)
    with torch.no_grad():
        output = model(**batch)
    outputs = [each.clone() for each in tree_leaves(output) if isinstance(each, torch.Tensor)]
    place[:] = ["full_state_dict()"]
    state = model.full_state_dict(rank0_only=False) if sharded else model.state_dict()
    weights = {name: value.detach().clone() for name, value in state.items() if isinstance(value, torch.Tensor)}
    place[:] = ["generate"]
    generates = model.can_generate() and "generate" not in without
    return Result(losses, weights, outputs, _generate(model, batch) if generates else None)


def _generate(model: Any, batch: dict[str, Any]) -> torch.Tensor | None:
    model.generation_config.eos_token_id = None  # all ranks generate as many tokens
    left = {key: value for key, value in batch.items() if key not in ("labels", "decoder_input_ids", "return_loss")}
    tokens = model.generate(**left, max_new_tokens=2, min_new_tokens=2, do_sample=False)
    return tokens if isinstance(tokens, torch.Tensor) else None


def _take_buffers(model: nn.Module) -> None:
    state = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in state:
            dist.broadcast(buffer, 0)


def _average(params: list[nn.Parameter], noise: float) -> None:
    used = torch.tensor([param.grad is not None for param in params]).int()
    dist.all_reduce(used)
    for param, count in zip(params, used, strict=True):
        if count:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
            if noise:
                param.grad *= 1 + noise * torch.randn(param.shape, generator=torch.Generator().manual_seed(7))


def compare(found: Result, wanted: Result, start: dict[str, torch.Tensor]) -> tuple[float, str]:
    """How far apart they are, of what changed at all, and where."""
    pairs = [
        (name, found.weights.get(name), value, value.double() - start[name]) for name, value in wanted.weights.items()
    ]
    for what in ("losses", "outputs"):
        both = itertools.zip_longest(getattr(found, what), getattr(wanted, what))
        pairs += [(f"{what}[{number}]", one, other, other) for number, (one, other) in enumerate(both)]
    if wanted.tokens is not None:
        pairs.append(("what is generated", found.tokens, wanted.tokens, wanted.tokens))
    worst = (0.0, "nothing")
    for what, one, other, change in pairs:
        if one is None or other is None or one.shape != other.shape:
            return float("inf"), f"(the shape of) {what}"
        if one.numel():
            broken = 0.0 if one.isnan().equal(other.isnan()) else 1e9
            off = float((one.double() - other.double()).abs().nan_to_num(broken).max())
            worst = max(worst, (off / (float(change.double().abs().nan_to_num().max()) + 1e-5), what))
    return worst


def outcome_of(name: str) -> str:
    """What becomes of a class, on one rank."""
    place, without = [""], ""
    try:
        case = make_case(name)
        start = build(name).state_dict()
    except NoPlain as error:
        return f"no plain: {error}"
    while True:
        try:
            wanted = train(case, place, without, sharded=False)
            break
        except Exception as error:
            what = place[0].split()[-1]
            if what not in ("checkpointing", "generate"):
                return f"no plain: {place[0]}: {one_line(error)}"
            without = f"{without} {what}"
    try:
        found = train(case, place, without, sharded=True)
    except CommunicationError as error:
        return f"WRONG: alone: {place[0]}: {one_line(error)}"
    except StreamShardError as error:
        return f"refused: {place[0]}: {one_line(error)}"
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"WRONG: {place[0]}: {one_line(error)[:300]} ({last.filename}:{last.lineno})"
    off, where = compare(found, wanted, start)
    worst = torch.tensor(off)
    dist.all_reduce(worst, dist.ReduceOp.MAX)  # what follows is for all ranks
    if worst < CLOSE:
        return f"equal: {case.inputs}, {case.labels}{without and f', without{without}'}"
    by_rounding, _ = compare(train(case, place, without, sharded=False, noise=1e-6), wanted, start)
    if by_rounding > CLOSE / 10:
        return f"no plain: rounding changes {where} by {by_rounding:.1e} of its change ({off:.1e})"
    return f"WRONG: differs: {where} is off by {off:.1e} of its change ({worst:.1e} on another rank)"


# -- ranks ------------------------------------------------------------------------------------------------------------


def run_case(name: str, world_size: int) -> str:
    """The outcome, from processes of their own: a crash or a hang is one too, and costs this class only."""
    with tempfile.TemporaryDirectory() as folder:
        children = [os.fork() or _run_rank(name, rank, world_size, Path(folder)) for rank in range(world_size)]
        deadline, left = time.monotonic() + CASE_S, set(children)
        while left and time.monotonic() < deadline:
            left -= {child for child in left if os.waitpid(child, os.WNOHANG)[0]}
            time.sleep(0.01)
        for child in left:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        outcomes = [path.read_text() for path in sorted(Path(folder).glob("[0-9]*"))]
    if left or len(outcomes) < world_size:
        return f"WRONG: {'hangs' if left else 'crashed'} ({'; '.join(outcomes)[:300]})"
    others = [
        each for each in outcomes if not re.match("WRONG: alone|no plain: step.*closed by peer", each)
    ] or outcomes
    kinds = {each.partition(":")[0] for each in others}
    return others[0] if len(kinds) == 1 else f"WRONG: ranks differ: {'; '.join(each[:200] for each in outcomes)}"


def _run_rank(name: str, rank: int, world_size: int, folder: Path) -> Any:
    outcome = "WRONG: no outcome"
    try:
        resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
        sys.stdout = sys.stderr = io.StringIO()
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
        outcome = outcome_of(name)
    except BaseException as error:
        outcome = f"WRONG: {one_line(error)[:300]} ({traceback.extract_tb(error.__traceback__)[-1]})"
    finally:
        (folder / f"{rank}").write_text(outcome)
        os._exit(0)


def main() -> int:
    """Print a line for each class and the counts; the number of wrong ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[], help="parts of names")
    parser.add_argument("--every", action="store_true", help="models without a head, too, of families that have heads")
    parser.add_argument("--out", type=Path, help="a JSON file of all outcomes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    outcomes: dict[str, str] = {}
    for name in class_names(every=given.every):
        if given.only and not any(part in name for part in given.only):
            continue
        with contextlib.suppress(Exception):
            getattr(transformers, name)  # imported once, for all ranks
        outcomes[name] = run_case(name, given.ranks)
        print(f"{name}: {outcomes[name][:300]}", flush=True)
    counts = collections.Counter(outcome.partition(":")[0] for outcome in outcomes.values())
    print(dict(counts))
    if given.out:
        given.out.write_text(json.dumps({"counts": counts, "outcomes": outcomes}, indent=1))
    return counts["WRONG"]


if __name__ == "__main__":
    sys.exit(main())

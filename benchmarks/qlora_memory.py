"""Memory per rank of QLoRA under DDP, FSDP2 and StreamShard: what tensors hold between steps, and at a step's peak.

    python benchmarks/qlora_memory.py               # two ranks on the CPU; prints the table of benchmarks/README.md

A Llama whose layers bitsandbytes has quantized to 4 bits (nf4, double quantization), LoRA of PEFT on all linear layers,
layers checkpointed, AdamW. Each system runs in processes of its own, and takes the same two steps. Held bytes are
counted after the first step and ``zero_grad()``, the peak during the second one; see `_live.LiveBytes`. Memory that
StreamShard's ranks share counts for the rank that owns it. "resident" is what the process's anonymous memory has grown
by, with shared memory; bytes that are freed and not given back to the system count there.

"wanted" are the bytes of the formula in benchmarks/README.md, from the sizes of the model before it is sharded. For
StreamShard they are those of `streamshard.plan`.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import bitsandbytes as bnb
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from _live import LiveBytes, shared_bytes
from _measure import RESULTS, environment, save
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from streamshard import Precision, StreamShard, plan
from streamshard.forms import form_of

BF16 = torch.bfloat16
OWN = Precision(param_dtype=None)  # each parameter computes in its own dtype, as under DDP
COUNTED = ("held", "wanted", "peak", "resident")
MMAP_THRESHOLD = {"MALLOC_MMAP_THRESHOLD_": "131072"}  # freed blocks go back to the system


class Sizes(NamedTuple):
    """A model and its batch."""

    layers: int
    width: int
    vocabulary: int
    lora_rank: int
    tokens: int


# -- the model ---------------------------------------------------------------------------------------------------------


def build(sizes: Sizes, storage: torch.dtype) -> Any:
    """The model with adapters, in training mode, as ``from_pretrained`` and PEFT make it.

    Args:
        sizes: its sizes.
        storage: ``bnb_4bit_quant_storage``.
    """
    torch.manual_seed(0)
    heads = {"num_attention_heads": sizes.width // 64, "num_key_value_heads": max(sizes.width // 256, 1)}
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=3 * sizes.width,
        num_hidden_layers=sizes.layers,
        max_position_embeddings=sizes.tokens,
        use_cache=False,
        **heads,
    )
    model: Any = LlamaForCausalLM(config).to(BF16)
    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, _quantized(child, storage))
    model.is_loaded_in_4bit = True  # PEFT asks for it
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    lora = LoraConfig(r=sizes.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora).train()


def _quantized(linear: nn.Linear, storage: torch.dtype) -> nn.Module:
    options = {"compress_statistics": True, "quant_type": "nf4", "quant_storage": storage}
    layer = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=BF16, device="meta", **options
    )
    weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, module=layer, **options)
    layer.weight = weight.to("cpu")
    return layer


def parts_of(model: nn.Module) -> dict[str, int]:
    """Bytes of the model before it is sharded."""
    parts = dict.fromkeys(("packed", "quantization", "other_frozen", "adapters", "buffers"), 0)
    for param in model.parameters():
        kind = "adapters" if param.requires_grad else "packed" if form_of(param).is_packed else "other_frozen"
        parts[kind] += param.nbytes
        parts["quantization"] += sum(tensor.nbytes for tensor in form_of(param).beside(param).values())
    parts["buffers"] = sum(buffer.nbytes for buffer in model.buffers())
    return parts


# -- the systems -------------------------------------------------------------------------------------------------------


def _ddp(model: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def _fsdp2(model: Any) -> nn.Module:
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    sharded: nn.Module = fully_shard(model)
    return sharded


def _fsdp2_ignoring(model: Any) -> nn.Module:
    """As accelerate 1.15 does for uint8 storage: packed weights stay whole on each rank."""
    ignored = {param for param in model.parameters() if form_of(param).is_packed}
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, ignored_params=ignored)
    sharded: nn.Module = fully_shard(model, ignored_params=ignored)
    return sharded


def _streamshard(model: Any) -> nn.Module:
    return StreamShard(model, precision=OWN)


class System(NamedTuple):
    """How a model is shared, and the storage dtype that people give its packed weights for that."""

    share: Callable[[Any], nn.Module]
    storage: torch.dtype


SYSTEMS = {
    "ddp": System(_ddp, torch.uint8),
    "fsdp2": System(_fsdp2, BF16),
    "fsdp2-uint8": System(_fsdp2, torch.uint8),  # without accelerate
    "fsdp2-accelerate": System(_fsdp2_ignoring, torch.uint8),
    "streamshard": System(_streamshard, torch.uint8),
}


DEFAULT_SYSTEMS = ("ddp", "fsdp2-accelerate", "fsdp2", "streamshard")  # fsdp2-uint8 holds what fsdp2 holds


def wanted_bytes(system: str, model: nn.Module, parts: dict[str, int], ranks: int) -> int:
    """Bytes that a rank holds between two steps: weights, gradients that stay, AdamW's moments.

    DDP keeps gradients in its buckets; FSDP2 frees them.
    """
    adapters, everywhere = parts["adapters"], parts["quantization"] + parts["buffers"]
    if system == "ddp":
        return parts["packed"] + parts["other_frozen"] + 4 * adapters + everywhere
    if system == "fsdp2-accelerate":
        return parts["packed"] + (parts["other_frozen"] + 3 * adapters) // ranks + everywhere
    if system.startswith("fsdp2"):
        return (parts["packed"] + parts["other_frozen"] + 3 * adapters) // ranks + everywhere
    return _zero3(model, ranks).total_bytes + parts["buffers"]


def _zero3(model: nn.Module, ranks: int) -> Any:
    return plan(model, ranks, transport="shared-memory", precision=OWN).stages[0]


# -- one rank ----------------------------------------------------------------------------------------------------------


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, sizes: Sizes, number: int) -> float:
    generator = torch.Generator().manual_seed(2 * number + dist.get_rank())
    tokens = torch.randint(sizes.vocabulary, (1, sizes.tokens), generator=generator)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def _resident_bytes() -> int:
    """Anonymous memory of this process, after freed blocks have gone back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


def _measure(rank: int, ranks: int, system: str, sizes: Sizes, directory: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # of transformers, on names that PEFT still uses
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    share, storage = SYSTEMS[system]
    small = sizes._replace(layers=2, width=256)
    _train(share(build(small, storage)), small, 1)  # loads what is loaded at the first use
    before = _resident_bytes()
    model = build(sizes, storage)
    parts = parts_of(model)
    wanted = wanted_bytes(system, model, parts, ranks)
    shared = share(model)
    losses, optimizer = _train(shared, sizes, 2)  # then embedding and head take turns with StreamShard's layers
    resident = _resident_bytes() - before
    live = LiveBytes()
    with live:
        losses.append(_step(shared, optimizer, sizes, 2))
    owned = shared_bytes(ranks) if system == "streamshard" else 0
    found: dict[str, Any] = {
        "held_bytes": live.held_bytes + owned,
        "peak_bytes": live.peak_bytes + owned,
        "wanted_bytes": wanted,
        "resident_bytes": resident + owned,
        "losses": losses,
        "model_bytes": parts,
    }
    if isinstance(shared, StreamShard):
        report = shared.memory_report()
        found["report_bytes"] = {**report.held_bytes, "Adam's moments": report.adam_bytes}
    Path(directory, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _train(model: nn.Module, sizes: Sizes, steps: int) -> tuple[list[float], torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
    return [_step(model, optimizer, sizes, number) for number in range(steps)], optimizer


# -- all ranks ---------------------------------------------------------------------------------------------------------


def main() -> None:
    """Measure each system with each number of layers, then print."""
    arguments = _parse()
    os.environ |= {"OMP_NUM_THREADS": "1", **MMAP_THRESHOLD}
    models: dict[str, Any] = {}
    for layers in arguments.layers:
        sizes = Sizes(layers, arguments.width, arguments.vocabulary, arguments.lora_rank, arguments.tokens)
        row = models[f"{layers}x{sizes.width}"] = {}
        for system in arguments.systems:
            row[system] = _on_ranks(arguments.ranks, system, sizes)
            print(_line(f"{layers}x{sizes.width}", system, row[system]), flush=True)
    config = {name: value for name, value in vars(arguments).items() if name != "output"}
    config |= {"backend": "gloo", "warmup_steps": 2, "repeats": 1, "environment": MMAP_THRESHOLD}
    result = {"benchmark": "qlora_memory", "environment": environment(torch.device("cpu")), "config": config}
    save({**result, "models": models}, arguments.output)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[32, 16], help="one model for each number")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--lora-rank", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="per rank and step")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=DEFAULT_SYSTEMS)
    parser.add_argument("--output", type=Path, default=RESULTS / "qlora_memory-cpu.json")
    return parser.parse_args()


def _on_ranks(ranks: int, system: str, sizes: Sizes) -> dict[str, Any]:
    """What rank 0 has found, with the largest bytes of all ranks; or why the system does not run."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            multiprocessing.spawn(_measure, (ranks, system, sizes, directory), nprocs=ranks)  # type: ignore[no-untyped-call]
        except multiprocessing.ProcessRaisedException as error:
            return {"not_run": str(error).strip().splitlines()[-1]}
        everywhere = [json.loads(Path(directory, f"{rank}.json").read_text()) for rank in range(ranks)]
    first: dict[str, Any] = everywhere[0]
    most = {f"{name}_bytes": max(each[f"{name}_bytes"] for each in everywhere) for name in COUNTED}
    return {**first, **most}


def _line(model: str, system: str, found: dict[str, Any]) -> str:
    if "not_run" in found:
        return f"{model:10} {system:16} not run: {found['not_run']}"
    cells = " ".join(f"{name} {found[f'{name}_bytes'] / 1e6:8.2f}" for name in COUNTED)
    return f"{model:10} {system:16} MB {cells}  losses {' '.join(f'{loss:.5f}' for loss in found['losses'])}"


if __name__ == "__main__":
    main()

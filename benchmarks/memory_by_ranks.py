"""Memory per rank by the number of ranks, for DDP, FSDP2 and StreamShard: weights, gradients, AdamW's state, buffers.

    python benchmarks/memory_by_ranks.py --picture docs/images/memory.svg    # the picture of README.md

Measured, on 2 and 4 CPU ranks: the most bytes that tensors of one rank hold in the second step of a small Llama, with
two tokens, so that activations are small (see `_live.LiveBytes`). Layers compute in bf16, gradients are summed in fp32,
AdamW is fused. DDP computes under autocast, and keeps gradients in its buckets (``gradient_as_bucket_view``).

Computed for Llama 3 8B over NCCL, by `peak_bytes`: from `streamshard.plan` for StreamShard, formulas for the others.
The same function computes the bytes of the small Llama. The result has both numbers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from _live import LiveBytes, shared_bytes
from _measure import RESULTS, environment, save
from _picture import draw_memory
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from streamshard import StreamShard, plan

LLAMA_3_8B = {"width": 4096, "inner": 14336, "layers": 32, "heads": 32, "vocabulary": 128256}
SMALL = {"width": 256, "inner": 896, "layers": 16, "heads": 4, "vocabulary": 8192}  # similar proportions
BF16 = torch.bfloat16


def build(width: int, inner: int, layers: int, heads: int, vocabulary: int) -> nn.Module:
    """A Llama with four query heads for each key-value head, as in Llama 3."""
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=heads // 4, use_cache=False)
    )


def peak_bytes(system: str, sizes: dict[str, int], ranks: int, backend: str) -> int:
    """Bytes of a rank at the peak of a step, without activations.

    The state takes 16 bytes per parameter: fp32 weights and gradients, AdamW's moments. The embedding has E elements,
    and so has the head.

    - DDP: the state, and autocast's bf16 copies of linear weights. The head's gradient (4 E) is not in its bucket yet.
    - FSDP2: a part of the state. The embedding's gradient comes last: in bf16, and in fp32 for the reduction (6 E).
      gloo copies the reduction's input (4 E more).
    - StreamShard: the plan. The head's gradient in bf16 (2 E) is not in its slot yet.
    """
    with torch.device("meta"):
        model: Any = build(**sizes)
    numel, embedding = sum(param.numel() for param in model.parameters()), model.lm_head.weight.numel()
    if system == "ddp":
        linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
        return 16 * numel + 2 * linear + 4 * embedding
    if system == "fsdp2":
        return 16 * numel // ranks + (10 if backend == "gloo" else 6) * embedding
    transport = "shared-memory" if backend == "gloo" else "nccl"
    return plan(model, ranks, transport=transport).stages[0].total_bytes + 2 * embedding


def _ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def _fsdp2(model: Any) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    for module in (*model.model.layers, model.model.embed_tokens, model.lm_head, model):
        fully_shard(module, mp_policy=policy)
    sharded: nn.Module = model
    return sharded


SYSTEMS: dict[str, Callable[[Any], nn.Module]] = {"ddp": _ddp, "fsdp2": _fsdp2, "streamshard": StreamShard}


def _measure(rank: int, ranks: int, system: str, sizes: dict[str, int], directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    model = SYSTEMS[system](build(**sizes))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.tensor([[rank, 1]])

    def step() -> None:
        with torch.autocast("cpu", BF16, enabled=system == "ddp"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    live = LiveBytes()
    with live:
        step()
    owned = shared_bytes(ranks) if system == "streamshard" else 0
    Path(directory, f"{rank}.json").write_text(json.dumps(live.peak_bytes + owned))
    dist.barrier()
    dist.destroy_process_group()


def _measured(system: str, sizes: dict[str, int], ranks: int) -> int:
    """The most of all ranks."""
    with tempfile.TemporaryDirectory() as directory:
        multiprocessing.spawn(_measure, (ranks, system, sizes, directory), nprocs=ranks)  # type: ignore[no-untyped-call]
        return max(int(json.loads(Path(directory, f"{rank}.json").read_text())) for rank in range(ranks))


def main() -> None:
    """Measure, compute, print, save and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured-ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64], help="of Llama 3 8B")
    parser.add_argument("--layers", type=int, default=SMALL["layers"], help="of the small Llama")
    parser.add_argument("--picture", type=Path, help="draw Llama 3 8B")
    parser.add_argument("--output", type=Path, default=RESULTS / "memory_by_ranks-cpu.json")
    arguments = parser.parse_args()
    small = {**SMALL, "layers": arguments.layers}
    measured: dict[str, dict[str, Any]] = {}
    for ranks, system in itertools.product(arguments.measured_ranks, SYSTEMS):
        found = {"measured": _measured(system, small, ranks), "computed": peak_bytes(system, small, ranks, "gloo")}
        measured[f"{system}, {ranks} ranks"] = {f"{name}_bytes": count for name, count in found.items()}
        print(
            f"{ranks} ranks, {system:11}",
            *(f"{name} {count / 1e6:.2f} MB" for name, count in found.items()),
            flush=True,
        )
    computed = {
        f"{ranks} ranks": {system: peak_bytes(system, LLAMA_3_8B, ranks, "nccl") / 2**30 for system in SYSTEMS}
        for ranks in arguments.ranks
    }
    for ranks, row in computed.items():
        print(ranks, " ".join(f"{system} {gib:.1f} GiB" for system, gib in row.items()))
    where = environment(torch.device("cpu"))
    config = {"small": small, "llama_3_8b": LLAMA_3_8B, "tokens": 2, "warmup_steps": 1}
    result = {"benchmark": "memory_by_ranks", "environment": where, "config": config, "measured": measured}
    save({**result, "llama_3_8b_gib": computed}, arguments.output)
    if arguments.picture is not None:
        draw_memory(computed, arguments.picture)


if __name__ == "__main__":
    main()

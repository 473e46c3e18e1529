"""Memory per rank by the number of ranks, for DDP, FSDP2 and StreamShard: weights, gradients, AdamW's state, buffers.

    python benchmarks/memory_by_ranks.py --picture docs/images/memory.svg    # the picture of README.md

Measured, on 2 and 4 CPU ranks: the most bytes that tensors of one rank hold in the third step of a small Llama, with
two tokens, so that activations are small (see `_live.LiveBytes`). Layers compute in bf16, gradients are summed in fp32,
AdamW is fused. DDP computes under autocast, and keeps gradients in its buckets (``gradient_as_bucket_view``). FSDP2 and
StreamShard are measured once more with steps inside backward: a hook on each parameter steps it.

Computed for Llama 3 8B over NCCL, at the peak and at the start of backward, by `peak_bytes`: from `streamshard.plan`
for StreamShard, formulas for the others.
The same function computes the bytes of the small Llama. The result has both numbers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

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


class Bytes(NamedTuple):
    """The most bytes of a rank until backward reaches the last layer, and in the whole step."""

    start: int
    peak: int


def peak_bytes(system: str, sizes: dict[str, int], ranks: int, backend: str) -> Bytes:
    """Bytes of a rank in a step, without activations.

    The state takes 16 bytes per parameter: fp32 weights and gradients, AdamW's moments. The embedding has E elements,
    and so has the head; a layer has b.

    - DDP: the state, and autocast's bf16 copies of linear weights. The head's gradient (4 E) is not in its bucket yet.
    - FSDP2: a part of the state. Gradients, 4 of the 16 bytes, have memory from their reduction on. The head's backward
      takes its weight and its gradient in bf16, and its gradient in fp32 for the reduction (6 E), and the next layer's
      weights (2 b). The last layer comes with the fp32 gradient of the head (4 E + 6 b), the first one with its
      neighbour's (8 b) and the embedding, which is prefetched (2 E). The embedding's gradient comes last (6 E). gloo
      copies the input of the largest reduction (4 E more).
    - StreamShard: the plan, at two moments. The gradient of the head in bf16 (2 E) is not in its slot yet. Its main
      grads (4 E / N) follow when it is, with the gradients of the last layer (2 b). The first layer has no main grads
      before its gradients (2 b) are in the slot. The embedding's gradient is made by ranges of rows (2 E / 8).
    """
    with torch.device("meta"):
        model: Any = build(**sizes)
    numel, embedding = sum(param.numel() for param in model.parameters()), model.lm_head.weight.numel()
    layer = sum(param.numel() for param in model.model.layers[0].parameters())
    if system == "ddp":
        linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
        return Bytes(*[16 * numel + 2 * linear + 4 * embedding] * 2)
    if system == "fsdp2":
        copied = 4 * embedding * (backend == "gloo")
        start = 12 * numel // ranks + 6 * embedding + 2 * layer + copied
        last = 12 * numel // ranks + 4 * embedding + 6 * layer
        first = 16 * numel // ranks - 4 * (embedding + layer) // ranks + 8 * layer + 2 * embedding
        return Bytes(start, max(start, last, first, 16 * numel // ranks + 6 * embedding + copied))
    stage = plan(model, ranks, transport="shared-memory" if backend == "gloo" else "nccl").stages[0]
    start = stage.start_bytes + max(2 * embedding, 4 * embedding // ranks + 2 * layer)
    first = stage.total_bytes + 2 * layer - 4 * (embedding + layer) // ranks
    last = stage.total_bytes + max(0, embedding // 4 - 4 * embedding // ranks)
    return Bytes(start, max(start, first, last))


def _ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def _fsdp2(model: Any) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    for module in (*model.model.layers, model.model.embed_tokens, model.lm_head, model):
        fully_shard(module, mp_policy=policy)
    sharded: nn.Module = model
    return sharded


SYSTEMS: dict[str, Callable[[Any], nn.Module]] = {"ddp": _ddp, "fsdp2": _fsdp2, "streamshard": StreamShard}
MEASURED = (*((system, False) for system in SYSTEMS), ("fsdp2", True), ("streamshard", True))


def _step_in_backward(params: Iterable[nn.Parameter]) -> None:
    """Let a hook step each parameter, behind its gradient."""
    optimizers = {param: torch.optim.AdamW([param], fused=True) for param in params}

    def step(param: nn.Parameter) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in optimizers:
        param.register_post_accumulate_grad_hook(step)


def _measure(rank: int, ranks: int, system: str, is_in_backward: bool, sizes: dict[str, int], directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    model = SYSTEMS[system](build(**sizes))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if is_in_backward:
        _step_in_backward(model.parameters())
    tokens = torch.tensor([[rank, 1]])

    def step() -> None:
        with torch.autocast("cpu", BF16, enabled=system == "ddp"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if not is_in_backward:
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(2):  # from the second on, embedding and head take turns with StreamShard's layers
        step()
    live = LiveBytes()
    with live:
        step()
    owned = shared_bytes(ranks) if system == "streamshard" else 0
    Path(directory, f"{rank}.json").write_text(json.dumps(live.peak_bytes + owned))
    dist.barrier()
    dist.destroy_process_group()


def _measured(system: str, is_in_backward: bool, sizes: dict[str, int], ranks: int) -> int:
    """The most of all ranks."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = ranks, system, is_in_backward, sizes, directory
        multiprocessing.spawn(_measure, arguments, nprocs=ranks)  # type: ignore[no-untyped-call]
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
    for ranks, (system, is_in_backward) in itertools.product(arguments.measured_ranks, MEASURED):
        found = {"measured_bytes": _measured(system, is_in_backward, small, ranks)}
        if not is_in_backward:
            found["computed_bytes"] = peak_bytes(system, small, ranks, "gloo").peak
        name = f"{system}, {ranks} ranks" + ", steps inside backward" * is_in_backward
        measured[name] = found
        print(f"{name:42}", *(f"{key} {count / 1e6:.2f} MB" for key, count in found.items()), flush=True)
    both = {
        f"{ranks} ranks": {system: peak_bytes(system, LLAMA_3_8B, ranks, "nccl") for system in SYSTEMS}
        for ranks in arguments.ranks
    }
    computed = {ranks: {system: bytes_.peak / 2**30 for system, bytes_ in row.items()} for ranks, row in both.items()}
    starts = {ranks: {system: bytes_.start / 2**30 for system, bytes_ in row.items()} for ranks, row in both.items()}
    for ranks, row in both.items():
        cells = (f"{system} {start / 2**30:.1f} {peak / 2**30:.1f} GiB" for system, (start, peak) in row.items())
        print(ranks, *cells)
    where = environment(torch.device("cpu"))
    config = {"small": small, "llama_3_8b": LLAMA_3_8B, "tokens": 2, "warmup_steps": 2}
    result = {"benchmark": "memory_by_ranks", "environment": where, "config": config, "measured": measured}
    save({**result, "llama_3_8b_gib": computed, "llama_3_8b_start_gib": starts}, arguments.output)
    if arguments.picture is not None:
        moments = {"start of backward, where activations are largest": starts, "end of backward": computed}
        draw_memory(moments, arguments.picture)


if __name__ == "__main__":
    main()

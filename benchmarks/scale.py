"""One rank of many, by how many there are: build, step, checkpoint, and what ranks tell each other.

    python benchmarks/scale.py

One process on torch's "fake" process group, whose other ranks do not exist. A Llama of 70B parameters and a mixture of
experts with 20,000 parameters are built at their true size from the meta device, with AdamW's moments. The checkpoint
is collected, and the manifest of all ranks is made, written and read, without tensors. Steps run in the same models of
a 128th of the width: host time depends on the number of layers and parameters, not on their size. All-gathers and
reductions do nothing there. Exchanges of objects are answered as if all ranks had sent the same; their bytes count.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _measure import RESULTS, Noise, environment, save, summary
from host_overhead import RanksAsOnGpus
from torch import nn

from streamshard import Precision, StreamShard
from streamshard.checkpoint.manifest import Manifest, PieceRecord, TensorRecord, join_records, read_manifest
from streamshard.checkpoint.run_parts import RunParts
from streamshard.checkpoint.safetensors_file import FileRecord
from streamshard.checkpoint.save import collect
from streamshard.checkpoint.storage import CHUNK_BYTES, MANIFEST_NAME
from streamshard.comm import nccl
from streamshard.comm.ranks import RankGroup

BF16 = Precision(param_dtype=torch.bfloat16)
NARROW = 128
FILE_BYTES = 1 << 30


class Expert(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class Block(nn.Module):
    """Four projections, and 128 experts of which eight compute. Each expert has Parameters of its own."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.projections = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.router = nn.Linear(width, 128, bias=False)
        self.experts = nn.ModuleList(Expert(width, inner) for _ in range(128))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = self.before(hidden)
        for projection in self.projections:
            mixed = projection(mixed)
        hidden = hidden + mixed
        routed = self.between(hidden)
        weights = self.router(routed).softmax(-1)
        for number in range(8):
            hidden = hidden + weights[..., number : number + 1] * self.experts[number](routed)
        return hidden


class Mixture(nn.Module):
    """52 layers of experts: 31B parameters in 20,335 tensors."""

    def __init__(self, layers: int, shrink: int) -> None:
        super().__init__()
        width, rows = 2048 // shrink, 151_936 // shrink
        self.embedding = nn.Embedding(rows, width)
        self.layers = nn.ModuleList(Block(width, 768 // shrink) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, rows, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def _llama(layers: int, shrink: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    class Logits(LlamaForCausalLM):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens, use_cache=False).logits

    sizes = {"hidden_size": 8192, "intermediate_size": 28_672, "vocab_size": 128_256}
    config = LlamaConfig(
        **{name: size // shrink for name, size in sizes.items()},
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8 if shrink > 1 else 1,
    )
    return Logits(config)


MODELS: dict[str, tuple[Callable[[int, int], nn.Module], int]] = {"llama-70b": (_llama, 80), "mixture": (Mixture, 52)}


def main() -> None:
    """Measure each model on each number of ranks; print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[512, 4096])
    parser.add_argument("--only", choices=MODELS, help="one model")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--shrink", type=int, default=1, help="divide the true sizes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "scale-cpu.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [arguments.only] if arguments.only else list(MODELS)
    rounds: dict[tuple[str, int], list[dict[str, float]]] = {
        (name, size): [] for name in chosen for size in arguments.ranks
    }
    noise = Noise()
    for _ in range(arguments.rounds):
        noise.begin_round(0.0)
        for (name, size), found in rounds.items():
            found.append(_measure(name, size, arguments))
        noise.end_round()
    cases = []
    for (name, size), found in rounds.items():
        cases.append(
            {"case": f"{name} on {size} ranks", **{key: summary([each[key] for each in found]) for key in found[0]}}
        )
        print(f"\n{name} on {size} ranks")
        for key in found[0]:
            print(f"  {key:28} {cases[-1][key]['median']:12.3f}")
    config = {"backend": "fake", "layers": arguments.layers, "shrink": arguments.shrink, "rounds": arguments.rounds}
    cores = summary(noise.foreign_cores([noise.own_cpu_s()]))
    result = {"benchmark": "scale", "environment": environment(torch.device("cpu")), "config": config}
    save({**result, "foreign_cores": cores, "cases": cases}, arguments.output)


class Told:
    """The messages of this rank to the others."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def meet(
        self, ranks: RankGroup, name: str, data: bytes, answer: Callable[[list[bytes]], bytes], *, with_replicas: bool
    ) -> bytes:
        """Instead of `RankGroup._meet`."""
        self.sizes.append(len(name) + len(data))
        return answer([data] * (ranks.total_size if with_replicas else ranks.world_size))


@contextlib.contextmanager
def _one_of(size: int) -> Iterator[Told]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def do_nothing(*_: Any, **__: Any) -> None:
        pass

    told = Told()
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    gc.collect()
    gc.disable()
    try:
        with (
            mock.patch.object(nccl, "_all_gather_single", do_nothing),
            mock.patch.object(nccl, "_reduce_scatter_single", do_nothing),
            mock.patch.object(RankGroup, "_meet", lambda ranks, *given, **named: told.meet(ranks, *given, **named)),
            mock.patch("streamshard.build.Communicator", RanksAsOnGpus),
        ):
            yield told
    finally:
        gc.enable()
        dist.destroy_process_group()


def _measure(name: str, size: int, arguments: argparse.Namespace) -> dict[str, float]:
    make, layers = MODELS[name]
    layers = arguments.layers or layers
    found: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        found[what] = time.perf_counter() - start

    with torch.device("meta"):
        model = make(layers, arguments.shrink)
    with _one_of(size) as told:
        with timed("build_s"):
            sharded: Any = StreamShard(model, precision=BF16)
        report = sharded.memory_report()
        slots = report.held_bytes["weight slots"]
        found |= {"shard_mib": (report.total_bytes - slots) / 2**20, "slots_mib": slots / 2**20}
        found["flags_kib"] = report.held_bytes.get("flags", 0) / 2**10
        found |= {"build_exchanges": len(told.sizes), "build_sent_bytes": sum(told.sizes)}
        optimizer = torch.optim.AdamW(sharded.parameters())
        for param in sharded.parameters():
            optimizer.state[param] = {
                "step": torch.tensor(1.0),
                **{key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")},
            }
        told.sizes.clear()
        with timed("collect_s"):
            parts = RunParts.of("save_checkpoint", sharded, optimizer, None, accepts_empty=True)
            state, _ = collect(parts)
        found |= {"collect_exchanges": len(told.sizes), "collect_sent_bytes": sum(told.sizes)}
        _measure_manifest(parts.engine, size, state, found, timed)
    del model, sharded, optimizer, parts
    narrow = make(layers, NARROW)
    with _one_of(size) as told:
        sharded = StreamShard(narrow, precision=BF16)
        optimizer = torch.optim.AdamW(sharded.parameters(), foreach=True)
        told.sizes.clear()
        tokens, laps = torch.zeros(1, 4, dtype=torch.long), []
        for step in range(8):
            start = time.perf_counter()
            sharded(tokens).float().sum().backward()
            middle = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            laps.append((middle - start, time.perf_counter() - middle))
            if step == 3:
                found |= {"first_steps_exchanges": len(told.sizes), "first_steps_sent_bytes": sum(told.sizes)}
                told.sizes.clear()
        found["step_exchanges"] = len(told.sizes)
        found["host_ms_per_layer"] = min(lap for lap, _ in laps) * 1e3 / layers
        found["optimizer_ms"] = min(lap for _, lap in laps) * 1e3
    return found


def _measure_manifest(engine: Any, size: int, state: Any, found: dict[str, float], timed: Any) -> None:
    """What the first rank gets from all, and does with it; what each rank does when it loads."""
    by_rank: list[dict[str, TensorRecord]] = [{} for _ in range(size)]
    for unit in engine.units:
        for flat in unit.flat_params:
            for param in flat.params:
                first = param.layout.offset // flat.layout.shard_numel
                last = (param.layout.offset + param.layout.numel - 1) // flat.layout.shard_numel
                for rank in range(first, min(last, size - 1) + 1):
                    local = flat.layout.local_range(param.layout, rank)
                    piece = PieceRecord(rank, local.start, local.stop)
                    for tensor in ("model/{}", "optimizer/model/{}.exp_avg", "optimizer/model/{}.exp_avg_sq"):
                        record = TensorRecord(tuple(param.piece.shape), torch.float32, (piece,))
                        by_rank[rank][tensor.format(param.name)] = record
    messages = [pickle.dumps(each) for each in by_rank]
    found |= {"pieces": sum(map(len, by_rank)), "records_kb_of_a_rank": max(map(len, messages)) / 1e3}
    found["records_mb_at_the_first"] = sum(map(len, messages)) / 1e6
    with timed("join_s"):
        records = join_records(map(pickle.loads, messages))
    checksums = ["0" * 8] * math.ceil(FILE_BYTES / CHUNK_BYTES)
    files = tuple(
        FileRecord(f"rank-{rank:05d}-of-{size:05d}.safetensors", FILE_BYTES, checksums) for rank in range(size)
    )
    with tempfile.TemporaryDirectory() as directory:
        with timed("write_manifest_s"):
            text = Manifest(1, size, {}, files, records, state).encode()
            (Path(directory) / MANIFEST_NAME).write_bytes(text)
        with timed("read_manifest_s"):
            read_manifest(Path(directory))
    found["manifest_mb"] = len(text) / 1e6


if __name__ == "__main__":
    main()

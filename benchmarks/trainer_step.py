"""Step time of `StreamShardTrainer` and of transformers' Trainer under DistributedDataParallel, step by step in turn.

    python benchmarks/trainer_step.py --preset 8x512-256 [--bf16]      # starts two ranks on the CPU
    torchrun --nproc-per-node 2 benchmarks/trainer_step.py ...         # the same, started by you

Each trainer runs its own `train()` in a thread of its own, one of which is awake at a time: a callback sleeps where a
step begins until it is that trainer's turn, and a turn ends where the next step would begin. So a step is all that
Trainer does for one: forward, backward, clipping, optimizer, schedule, logging, loading the next batch. Every round
wakes each trainer once, in an order drawn anew, behind a barrier. A step's time is the slowest rank's.

accelerate trains with FSDP2 on GPUs only: on CPUs it ignores the plugin, so there is no such peer here.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # before there is a process group: see step_time.py
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.optim
from _measure import QUIET_CORES, RESULTS, Noise, environment, launch, save, seeded_order, summary
from _models import PRESETS, Preset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from streamshard.integrations.transformers import StreamShardTrainer

PEER = "ddp"
SYSTEMS: dict[str, tuple[type[Trainer], dict[str, Any]]] = {
    "ddp": (Trainer, {}),
    "streamshard": (StreamShardTrainer, {"streamshard": {}}),
    "streamshard, zero2": (StreamShardTrainer, {"streamshard": {"weight_slots": "all"}}),
}


def main() -> None:
    """Start ranks if nobody did, measure, and let rank 0 report."""
    arguments = _parse()
    if "LOCAL_RANK" not in os.environ:
        launch(2)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        _compare(arguments)
    finally:
        dist.destroy_process_group()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="8x512-256", help="layers x width - tokens per rank")
    parser.add_argument("--bf16", action="store_true", help="bf16=True of the training arguments; else fp32")
    parser.add_argument("--rounds", type=int, default=40, help="measured steps of each trainer")
    parser.add_argument("--warmup", type=int, default=5, help="steps of each trainer before measuring")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait in all for other processes")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/trainer_step-<preset>-<dtype>.json")
    return parser.parse_args()


class _Turns(TrainerCallback):
    """One trainer in its thread, whose steps somebody else counts out."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._wake = threading.Semaphore(0)
        self._asleep = threading.Semaphore(0)
        self._error: BaseException | None = None
        trainer.add_callback(self)
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()
        self._wait()

    def _train(self) -> None:
        try:
            self.trainer.train()
        except BaseException as error:
            self._error = error
        finally:
            self._asleep.release()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """In the trainer's thread."""
        self._asleep.release()
        self._wake.acquire()

    def step(self) -> None:
        """Let it train one step."""
        self._wake.release()
        self._wait()

    def _wait(self) -> None:
        self._asleep.acquire()
        if self._error is not None:
            raise self._error


def _trainer(name: str, preset: Preset, arguments: argparse.Namespace, directory: str) -> Trainer:
    """Of the same model and examples as the others."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=preset.vocabulary,
        hidden_size=preset.width,
        intermediate_size=4 * preset.width,
        num_hidden_layers=preset.layers,
        num_attention_heads=max(preset.width // 64, 1),
        max_position_embeddings=preset.sequence,
    )
    steps = arguments.warmup + arguments.rounds + 1
    settings = TrainingArguments(
        output_dir=directory,
        max_steps=steps,
        per_device_train_batch_size=preset.rows,
        bf16=arguments.bf16,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,  # the faster way, which Trainer's default is not
    )
    count = steps * preset.rows * dist.get_world_size()
    tokens = torch.randint(preset.vocabulary, (count, preset.sequence), generator=torch.Generator().manual_seed(1))
    data: Any = [{"input_ids": row, "labels": row} for row in tokens]
    kind, given = SYSTEMS[name]
    trainer = kind(model=LlamaForCausalLM(config), args=settings, train_dataset=data, **given)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _compare(arguments: argparse.Namespace) -> None:
    """Measure the trainers in turn; rank 0 prints and saves."""
    preset = PRESETS[arguments.preset]
    step_ms: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    noise = Noise()
    patience_s = arguments.patience if dist.get_rank() == 0 else 0.0  # the others wait at the step's barrier
    with tempfile.TemporaryDirectory() as directory:
        turns = {name: _Turns(_trainer(name, preset, arguments, directory)) for name in SYSTEMS}
        for index in range(arguments.warmup + arguments.rounds):
            is_measured = index >= arguments.warmup
            if is_measured:
                patience_s = noise.begin_round(patience_s)
            gc.collect()
            gc.disable()  # a collection would hit whichever trainer is awake
            for name in seeded_order(list(SYSTEMS), index):
                dist.barrier()
                began = time.perf_counter()
                turns[name].step()
                if is_measured:
                    step_ms[name].append((time.perf_counter() - began) * 1e3)
            gc.enable()
            if is_measured:
                noise.end_round()
        for each in turns.values():
            each.step()  # the last, and the end of train()
    losses = {
        name: [entry["loss"] for entry in each.trainer.state.log_history if "loss" in entry]
        for name, each in turns.items()
    }
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (step_ms, noise.own_cpu_s()))
    if dist.get_rank() == 0:
        slowest = {
            name: [max(ranks) for ranks in zip(*(own[name] for own, _ in everywhere), strict=True)] for name in SYSTEMS
        }
        result = _result(arguments, slowest, noise.foreign_cores([cpu_s for _, cpu_s in everywhere]), losses)
        _print(result)
        dtype = "bf16" if arguments.bf16 else "fp32"
        save(result, arguments.output or RESULTS / f"trainer_step-cpu-{arguments.preset}-{dtype}.json")


def _result(
    arguments: argparse.Namespace,
    step_ms: dict[str, list[float]],
    foreign_cores: list[float],
    losses: dict[str, list[float]],
) -> dict[str, Any]:
    quiet = [index for index, load in enumerate(foreign_cores) if load <= QUIET_CORES]
    systems: dict[str, Any] = {}
    for name, values in step_ms.items():
        ratios = [own / peer for own, peer in zip(values, step_ms[PEER], strict=True)]
        systems[name] = {
            "step_ms": summary(values),
            f"ratio_to_{PEER}": summary(ratios),
            f"ratio_to_{PEER}_quiet_rounds": summary([ratios[index] for index in quiet]) if quiet else None,
            "losses": losses[name],
            "rounds_ms": [round(value, 3) for value in values],
        }
    return {
        "benchmark": "trainer_step",
        "environment": environment(torch.device("cpu")),
        "config": {
            "preset": arguments.preset,
            **dataclasses.asdict(PRESETS[arguments.preset]),
            "model": "LlamaForCausalLM",
            "ranks": dist.get_world_size(),
            "backend": dist.get_backend(),
            "bf16": arguments.bf16,
            "optimizer": "Trainer's own",
            "warmup_steps": arguments.warmup,
            "rounds": arguments.rounds,
        },
        "noise": {
            "foreign_cores": summary(foreign_cores),
            "quiet_rounds": len(quiet),
            "quiet_means_foreign_cores_at_most": QUIET_CORES,
            "rounds_foreign_cores": [round(load, 3) for load in foreign_cores],
        },
        "systems": systems,
    }


def _print(result: dict[str, Any]) -> None:
    noise = result["noise"]
    print(f"other processes: {noise['foreign_cores']['median']:.2f} cores; quiet rounds: {noise['quiet_rounds']}")
    print(f"{'':20} {'step ms':>8} {'iqr':>6} {f'/ {PEER}':>8} {'95% of median':>15} {'quiet':>6}  losses")
    for name, entry in result["systems"].items():
        ratio, quiet = entry[f"ratio_to_{PEER}"], entry[f"ratio_to_{PEER}_quiet_rounds"]
        between = f"{ratio['median_low']:.3f}-{ratio['median_high']:.3f}"
        calm = quiet["median"] if quiet else float("nan")
        print(f"{name:20} {entry['step_ms']['median']:8.1f} {entry['step_ms']['iqr']:6.1f}", end="")
        print(f" {ratio['median']:8.3f} {between:>15} {calm:6.3f}  {entry['losses']}")


if __name__ == "__main__":
    main()

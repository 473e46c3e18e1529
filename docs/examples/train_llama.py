"""Train a small Llama on byte-level text with StreamShard, export it, load the export elsewhere and let it write.

    accelerate launch --config_file docs/examples/two_processes.yaml docs/examples/train_llama.py

Reads top to bottom: `main` is the story, what it calls follows in the order of use. Runs on CPU (gloo) and GPU (NCCL).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch
from _progress import Progress
from _ranks import LAUNCH, JobError, Ranks, end_with_error, join_ranks
from _text import BOS, EOS, VOCAB, Text, TextError, byte_frequency_loss, even_windows, random_starts, read_text, windows
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import LlamaConfig, LlamaForCausalLM

import streamshard
from streamshard import Precision, RunLog, StreamShard

REPORT_EVERY = 5  # steps between two points of the curve, and two lines of log.jsonl; each costs a small all-reduce
ARGUMENTS = "arguments.json"  # in the output directory
RESUME_TAKES = {"resume", "device", "steps", "save_every", "held_out_every"}  # the others are those of the run


def main() -> None:
    args, given = parse_args()
    ranks = join_ranks(args.device)
    out = output_directory(args, given, ranks)
    text = read_text_together(args, ranks)
    precision = choose_precision(args, ranks)

    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(llama_config(args)).to(ranks.device)
    parameter_count = model.num_parameters()
    model = StreamShard(model, precision=precision)
    optimizer = torch.optim.AdamW(parameter_groups(model, args.weight_decay), lr=args.lr, betas=(0.9, 0.95))
    curve = Curve()
    if args.resume is not None:
        resume(out, model, optimizer, curve, args, ranks)
    # It depends on the number of steps alone, so a checkpoint need not hold it, and more steps stretch the cosine.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_cosine(args.steps), curve.steps - 1)
    if ranks.is_first:
        write_whole(out / ARGUMENTS, lambda path: path.write_text(json.dumps(vars(args), default=str) + "\n"))
    held_out = held_out_windows(text, args, ranks)
    baseline = byte_frequency_loss(text.train, held_out)

    ranks.say(f"text: {text.source}, {len(text.train):,} tokens to train on, {len(text.held_out):,} held out")
    ranks.say(f"model: Llama with {parameter_count:,} parameters; {ranks}; parameters in {precision.param_dtype}")
    train(model, optimizer, schedule, text, held_out, curve, out, args, ranks)

    ranks.say(f"\non rank 0, {model.memory_report()}\n")
    streamshard.export_safetensors(model, out / "model")
    took_part = ranks.count_trained(curve.steps)
    ranks.leave()  # the rest is the first rank's alone
    if ranks.is_first:
        summary = {
            "held_out_loss": curve.held_out_loss[-1],
            "byte_frequency_loss": baseline,
            "ranks_that_took_part": took_part,
            "parameters": parameter_count,
            "param_dtype": str(precision.param_dtype),
            "device": str(ranks.device.type),
            "torch": torch.__version__,
            "arguments": {name: str(value) for name, value in vars(args).items()},
            "curve": vars(curve),
        }
        write_whole(out / "result.json", lambda path: path.write_text(json.dumps(summary, indent=1) + "\n"))
        write_whole(out / "loss_curve.png", lambda path: draw(curve, baseline, took_part, path))
        sample_elsewhere(out / "model", args, len(held_out))
        print(final_line(curve, baseline, took_part, ranks.world_size, out), flush=True)


# --- before the model -------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise JobError(f"{message} (--help lists the options)")


def parse_args() -> tuple[argparse.Namespace, set[str]]:
    """The arguments, and the names of those that were given."""
    parser = Parser(
        description=__doc__.splitlines()[0],
        usage=f"{LAUNCH} [options]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", type=Path, help="file or directory to train on; the standard library if not given")
    parser.add_argument("--out", type=Path, help="a new directory to write to; runs/train_llama-NNN if not given")
    parser.add_argument("--steps", type=positive_int, default=300, help="optimizer steps in all")
    parser.add_argument("--batch-size", type=positive_int, default=8, help="sequences per step on each rank")
    parser.add_argument("--seq-len", type=positive_int, default=256, help="tokens (bytes) per sequence")
    parser.add_argument("--hidden", type=positive_int, default=256, help="width of the model, a multiple of 64")
    parser.add_argument("--layers", type=positive_int, default=6, help="number of blocks")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="for all but norms and biases")
    parser.add_argument("--clip", type=float, default=1.0, help="gradients are clipped to this norm, over all ranks")
    parser.add_argument("--save-every", type=positive_int, default=100, help="steps between checkpoints; two are kept")
    parser.add_argument("--resume", type=Path, metavar="OUT",
                        help="go on with the run that writes to this directory; with more --steps, at the learning "
                        "rates of a run of that many steps")  # fmt: skip
    parser.add_argument("--held-out-every", type=positive_int, default=50, help="steps between held-out losses")
    parser.add_argument("--precision", choices=("auto", "bf16", "fp32"), default="auto",
                        help="dtype layers compute in; auto takes bf16 unless this CPU is slow at it")  # fmt: skip
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto",
                        help="auto takes GPUs if there is one for each process")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="for the initial weights, the batches and the sampling")
    args = parser.parse_args()
    if args.hidden % 64:
        parser.error(f"--hidden {args.hidden}: wanted a multiple of 64")
    unset = object()
    again = parser.parse_args(namespace=argparse.Namespace(**dict.fromkeys(vars(args), unset)))
    given = {name for name, value in vars(again).items() if value is not unset}
    if args.resume is not None and (others := given - RESUME_TAKES):
        parser.error(f"--resume goes on with the run's own arguments: leave out {', '.join(sorted(others))}")
    if args.seq_len < 2:
        parser.error(f"--seq-len {args.seq_len}: wanted 2 at least, one token to see and one to predict")
    return args, given


def positive_int(value: str) -> int:
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return number


def read_text_together(args: argparse.Namespace, ranks: Ranks) -> Text:
    outcome: Text | TextError
    try:
        outcome = read_text(args.data, args.seq_len)
    except TextError as problem:
        outcome = problem
    ranks.stop_on_error(str(outcome) if isinstance(outcome, TextError) else None)
    if isinstance(outcome, TextError):
        raise outcome  # not reached: stop_on_error has raised
    return outcome


def choose_precision(args: argparse.Namespace, ranks: Ranks) -> Precision:
    """bf16 parameters with fp32 reduction, or fp32 throughout where bf16 matmuls are emulated; kept in `args`."""
    choice = args.precision
    if choice == "auto":
        if ranks.device.type == "cuda":
            choice = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
        else:
            choice = "bf16" if matmul_seconds(torch.bfloat16) < matmul_seconds(torch.float32) else "fp32"
        choice = args.precision = ranks.from_first(choice)  # timings differ between ranks; the precision must not
    return Precision() if choice == "bf16" else Precision(param_dtype=torch.float32)


def matmul_seconds(dtype: torch.dtype) -> float:
    left, right = torch.randn(1024, 512).to(dtype), torch.randn(512, 512).to(dtype)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def output_directory(args: argparse.Namespace, given: set[str], ranks: Ranks) -> Path:
    """A new one, or that of the run to resume, whose arguments `args` become. The same on all ranks."""
    out, error, saved = "", None, {}
    if ranks.is_first:
        asked = args.resume or args.out
        try:
            if asked is None:
                taken = [int(path.name[-3:]) for path in Path("runs").glob("train_llama-[0-9][0-9][0-9]")]
                asked = Path("runs", f"train_llama-{max(taken, default=0) + 1:03d}")
            if args.resume is None:
                asked.mkdir(parents=True, exist_ok=True)
                if any(asked.iterdir()):
                    error = f"--out {asked} is not empty: wanted a new directory, or --resume {asked}"
            else:
                saved = json.loads((asked / ARGUMENTS).read_text())
            out = str(asked)
        except OSError as problem:
            what = f"--out {asked} cannot be made" if args.resume is None else f"--resume {asked} is no run"
            error = f"{what}: {problem.strerror}"
    ranks.stop_on_error(error)
    for name, value in ranks.from_first(saved).items():
        if name not in given | {"resume", "device", "out"}:
            setattr(args, name, Path(value) if name == "data" and value is not None else value)
    return Path(ranks.from_first(out))


# --- training ---------------------------------------------------------------------------------------------------------


def llama_config(args: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3 // 16 * 16,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        max_position_embeddings=args.seq_len,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Weight decay for all but norms and biases. The names are those of the model before it was sharded."""
    decayed: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (others if "norm" in name or name.endswith("bias") else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def warmup_then_cosine(steps: int) -> Callable[[int], float]:
    """The share of the highest learning rate at each step: up in a twentieth of the steps, then down to a tenth."""
    warmup = max(steps // 20, 1)

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(steps - warmup, 1))

    return share


def held_out_windows(text: Text, args: argparse.Namespace, ranks: Ranks) -> torch.Tensor:
    """About 128 windows, the same on all ranks: a whole number of batches for each of them."""
    per_batch = args.batch_size * ranks.world_size
    return even_windows(text.held_out, args.seq_len, -(-128 // per_batch) * per_batch)


@dataclass
class Curve:
    """Losses in nats per byte (token); those of training are means over ranks and the last `REPORT_EVERY` steps."""

    steps: int = 0
    seconds: float = 0.0
    train_step: list[int] = field(default_factory=list)
    train_loss: list[float] = field(default_factory=list)
    held_out_step: list[int] = field(default_factory=list)
    held_out_loss: list[float] = field(default_factory=list)


def resume(
    out: Path,
    model: StreamShard,
    optimizer: torch.optim.Optimizer,
    curve: Curve,
    args: argparse.Namespace,
    ranks: Ranks,
) -> None:
    """Go on at the latest checkpoint; from the beginning if the run was killed before there was one."""
    if ranks.from_first(streamshard.latest(out / "checkpoints") is None):
        ranks.say(f"{out} has no checkpoint yet: beginning anew")
        return
    saved = streamshard.load_checkpoint(out / "checkpoints", model, optimizer)
    vars(curve).update(saved["curve"])
    if curve.steps > args.steps:
        ranks.stop_on_error(f"--steps {args.steps}: {out} has {curve.steps} steps already; wanted more, or no --steps")
    then = "going on" if curve.steps < args.steps else "all are done, writing the results again (--steps N trains on)"
    ranks.say(f"{saved.path}: {curve.steps} of {args.steps} steps; {then}")


def train(
    model: StreamShard,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    text: Text,
    held_out: torch.Tensor,
    curve: Curve,
    out: Path,
    args: argparse.Namespace,
    ranks: Ranks,
) -> None:
    """The steps up to `args.steps` that `curve` does not have, with checkpoints; the last is complete at the end."""
    start = time.perf_counter() - curve.seconds
    log = RunLog(model, path=out / "log.jsonl", every=REPORT_EVERY, step=curve.steps)
    progress = Progress(args.steps, curve.steps, ranks.is_first)
    for step in range(curve.steps + 1, args.steps + 1):
        batch = batch_of(step, text, args, ranks)
        model.train()
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        model.clip_grad_norm_(args.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        curve.steps = step
        progress.step()

        saves = step % args.save_every == 0 or step == args.steps
        if values := log.step(batch.numel(), loss) or (log.write() if saves else None):
            curve.train_step.append(step)
            curve.train_loss.append(values["loss"])
            memory = f"{values['peak_memory_bytes'] / 2**20:,.0f} MiB at most"
            progress.show(f"loss {values['loss']:.3f}, {values['tokens_per_s']:,.0f} tokens/s, {memory}")
        if step % args.held_out_every == 0 or step == args.steps:
            curve.held_out_step.append(step)
            with log.paused():
                curve.held_out_loss.append(evaluate(model, held_out, args.batch_size, ranks))
            if ranks.is_first:
                progress.write(f"step {step}: held-out loss {curve.held_out_loss[-1]:.3f}")
        curve.seconds = time.perf_counter() - start
        if saves:
            own = ranks.from_first(vars(curve))  # its seconds differ between ranks
            is_last = step == args.steps
            with log.paused():
                streamshard.save_checkpoint(
                    out / "checkpoints", model, optimizer, {"curve": own}, keep=2, step=step, wait=is_last
                )
    progress.close()


def batch_of(step: int, text: Text, args: argparse.Namespace, ranks: Ranks) -> torch.Tensor:
    """This rank's part [batch_size, seq_len] int64 of a step's random windows."""
    mine = slice(ranks.rank * args.batch_size, (ranks.rank + 1) * args.batch_size)
    count = args.batch_size * ranks.world_size
    starts = random_starts(text.train, args.seq_len, count, seed=args.seed * 1_000_003 + step - 1)
    return windows(text.train, starts[mine], args.seq_len).to(ranks.device)


def evaluate(model: StreamShard, held_out: torch.Tensor, batch_size: int, ranks: Ranks) -> float:
    """The mean loss over all held-out windows; each rank takes an equal part of them."""
    model.eval()
    with torch.no_grad():
        mine = held_out.chunk(ranks.world_size)[ranks.rank].to(ranks.device)
        losses = [model(input_ids=rows, labels=rows, use_cache=False).loss for rows in mine.split(batch_size)]
    return ranks.mean(torch.stack(losses).mean())


# --- what is left behind ----------------------------------------------------------------------------------------------


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make the file under a temporary name and rename it when complete: half a file never looks whole."""
    unfinished = path.with_name(f".unfinished-{path.name}")
    write(unfinished)
    with open(unfinished, "rb") as file:
        os.fsync(file.fileno())
    unfinished.replace(path)


def draw(curve: Curve, baseline: float, rank_count: int, path: Path) -> None:
    """The loss curve as a PNG."""
    import matplotlib

    matplotlib.use("Agg")  # no screen needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    axes.axhline(baseline, color="0.5", linestyle="--", label=f"byte frequencies alone, held-out: {baseline:.2f}")
    axes.plot(curve.train_step, curve.train_loss, ".-", color="tab:blue", markersize=3, linewidth=1, label="train")
    label = f"held-out, at the end {curve.held_out_loss[-1]:.2f}"
    axes.plot(curve.held_out_step, curve.held_out_loss, "o-", color="tab:orange", markersize=5, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", xlim=(0, curve.steps), ylim=(0, None))
    axes.set_title(f"Llama on byte-level text, StreamShard on {rank_count} rank{'s' if rank_count > 1 else ''}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=120)
    pyplot.close(figure)


def sample_elsewhere(model_directory: Path, args: argparse.Namespace, held_out_count: int) -> None:
    """Run `_sample.py` on the export in a plain process: one that knows nothing of ranks."""
    command = [sys.executable, str(Path(__file__).with_name("_sample.py")), str(model_directory)]
    command += ["--held-out", str(held_out_count), "--seq-len", str(args.seq_len), "--seed", str(args.seed)]
    command += ["--tokens", str(max(args.seq_len - 8, 1))]
    if args.data is not None:
        command += ["--data", str(args.data)]
    launchers = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "ACCELERATE_", "OMP_")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    subprocess.run(command, check=True, env=plain)


def final_line(curve: Curve, baseline: float, took_part: int, world_size: int, out: Path) -> str:
    loss = curve.held_out_loss[-1]
    verdict = "below" if loss < baseline else "NOT below"
    results = (path for path in out.rglob("*") if path.is_file() and "checkpoints" not in path.parts)
    files = sorted(path.relative_to(out).as_posix() for path in results)
    return (
        f"held-out loss {loss:.3f} nats per byte, {verdict} that of byte frequencies ({baseline:.3f}); "
        f"{took_part} of {world_size} ranks took part in all {curve.steps} steps ({curve.seconds:.0f} s); "
        f"written to {out}: {', '.join(files)}"
    )


def main_or_error() -> None:
    try:
        main()
    except JobError as problem:
        end_with_error(problem)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("\ninterrupted: the output directory holds what was finished by now; --resume goes on", flush=True)
        os._exit(130)  # at once: an orderly exit would wait for collectives that the other ranks have left


if __name__ == "__main__":
    record(main_or_error)()  # puts an unforeseen error of any rank into the launcher's summary, which is seen last

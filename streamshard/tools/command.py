"""The command ``streamshard``: plan a training run, measure the machine, inspect and convert checkpoints. Needs no GPU.

Each command imports what it needs itself: torch takes seconds to import, and ``--help`` does not need it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from streamshard import __version__
from streamshard.errors import CheckpointError, ConfigError, StreamShardError, UnitError, printable
from streamshard.tools.host_time import MACHINES, Machine, Step, parse_rate

_ABOUT = "Plan memory, measure the machine, inspect and convert checkpoints, compare runs. Needs no GPU."
_RUN = "a checkpoint, or a directory of checkpoints: the newest intact one is used"
_OF_STEP = "--link, --host-memory, --flops, --local-ranks, --micro-batches, --checkpointing and --active"
_EXIT_CODES = "Exit codes: 0 success, 1 an error (one line on standard error), 2 wrong usage."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: the command's arguments. None: the arguments of the process.

    Returns:
        The exit code: 0; 1 after an error (one line on standard error); 2 after wrong usage.
    """
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has ended: `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        return 1
    except (StreamShardError, OSError) as error:
        _say(f"streamshard {arguments.command}: {error}", sys.stderr)
        return 2 if isinstance(error, ConfigError | UnitError) else 1
    return 0


def _say(text: object, stream: TextIO | None = None) -> None:
    """Print one line. Control characters are escaped: names in an untrusted checkpoint may contain some."""
    print(printable(str(text)), file=stream)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("streamshard", description=_ABOUT, epilog=_EXIT_CODES)
    parser.add_argument("--version", action="version", version=f"streamshard {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--precision", default="bf16", help="bf16, fp16 or fp32 (%(default)s)")
    common.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")

    about = "how much memory and communication training a model takes; with --batch and --seq, its activations too"
    plan = commands.add_parser("plan", help=about, parents=[common])
    about = "a transformers config.json, its directory, or a function that builds a model: package.module:function"
    plan.add_argument("model", metavar="MODEL", help=about)
    for name, what in (("batch", "sequences per rank"), ("seq", "tokens per sequence")):
        plan.add_argument(f"--{name}", type=int, metavar=name[0].upper(), help=f"{what}, of MODEL's forward")
    about = "ranks that share the model; without it, the fewest that fit --budget"
    plan.add_argument("--ranks", type=int, metavar="N", help=about)
    about = "cut matrices over K of them: by transformers' own plan, or a function builds MODEL on the mesh it is given"
    plan.add_argument("--tp", type=int, default=1, metavar="K", help=about)
    about = "spread experts over K of them: a function builds MODEL on the mesh it is given"
    plan.add_argument("--ep", type=int, default=1, metavar="K", help=about)
    about = "replicas of the model, each on N ranks of their own, as on a 2-D mesh"
    plan.add_argument("--replicas", type=int, default=1, metavar="R", help=about)
    about = "plan Precision(sums_in_rank_order=True)"
    plan.add_argument("--sums-in-rank-order", action="store_true", help=about)
    about = "cut state over replicas too, as StreamShard(model, shard_over_replicas=True) does"
    plan.add_argument("--shard-over-replicas", action="store_true", help=about)
    plan.add_argument("--budget", metavar="SIZE", help="memory of a rank, such as 80G or 80GiB: says what fits")
    plan.add_argument("--slots", type=int, metavar="K", dest="weight_slots", help="plan K weight slots too")
    about = "what connects the ranks: %(choices)s (%(default)s)"
    plan.add_argument("--transport", choices=("nccl", "sockets", "shared-memory"), default="nccl", help=about)
    plan.add_argument("--offload", choices=("state",), help="keep state in host memory")
    about = "with --offload, state that stays on the device, such as 20GiB"
    plan.add_argument("--device-budget", default=0, metavar="SIZE", help=about)
    _add_step(plan)
    about = "modules or classes of modules that become units"
    plan.add_argument("--units", nargs="+", action="extend", metavar="NAME", help=about)
    about = "modules whose weights are read outside of their layer"
    plan.add_argument("--resident", nargs="+", action="extend", default=[], metavar="NAME", help=about)
    about = "combine layers until a unit has so much, such as 1MiB"
    plan.add_argument("--min-unit-size", default=0, metavar="SIZE", help=about)
    plan.set_defaults(run=_plan)

    about = "what slows this machine down; with a launcher, how fast its ranks communicate"
    doctor = commands.add_parser("doctor", help=about, parents=[common])
    doctor.set_defaults(run=_doctor)

    _add_files(commands)
    return parser


def _add_files(commands: Any) -> None:
    """Commands for files that runs have written."""
    inspect = commands.add_parser("inspect", help="list checkpoints, or verify one")
    inspect.add_argument("directory", metavar="DIR", help="a checkpoint, or a directory of checkpoints")
    inspect.add_argument("--tensors", action="store_true", help="list all tensors: name, dtype, shape")
    inspect.set_defaults(run=_inspect)

    compare = commands.add_parser("compare", help="where two runs begin to differ: files of streamshard.fingerprints")
    for name in ("A", "B"):
        compare.add_argument(name.lower(), metavar=name, type=Path, help="what streamshard.fingerprints has written")
    compare.set_defaults(run=_compare)

    convert = commands.add_parser("convert", help="convert a checkpoint to FSDP2's format (DCP), or back")
    convert.add_argument("directory", metavar="DIR", help=f"--to: {_RUN}; --from: a DCP directory")
    convert.add_argument("out", metavar="OUT", help="--to: a new directory; --from: one of checkpoints")
    way = convert.add_mutually_exclusive_group(required=True)
    way.add_argument("--to", choices=("dcp",), help="write OUT for dcp.load and set_state_dict")
    way.add_argument("--from", choices=("dcp",), dest="source", help="add a checkpoint for load_checkpoint to OUT")
    for name in ("model", "optimizer"):
        about = f"with --from: the prefix of the {name}'s keys (%(default)s)"
        convert.add_argument(f"--{name}-key", metavar="KEY", default=name, help=about)
    convert.set_defaults(run=_convert)


def _add_step(plan: argparse.ArgumentParser) -> None:
    """Options of ``plan`` for the time of a step."""
    about = "plan M micro-batches in a step, by model.accumulate: memory, and on a machine whether it pays"
    plan.add_argument("--accumulate", type=int, metavar="M", help=about)
    about = "with --offload or --accumulate, predict the time of a step on such a machine: %(choices)s. The next four "
    about += "change its figures"
    plan.add_argument("--machine", choices=MACHINES, metavar="NAME", help=about)
    about = "between a rank and host memory, or without --offload other ranks, each way, such as 50GB/s"
    plan.add_argument("--link", metavar="RATE", help=about)
    plan.add_argument("--host-memory", metavar="RATE", help="of the machine's memory, such as 150GB/s")
    plan.add_argument("--flops", metavar="RATE", help="of a rank, such as 400T")
    plan.add_argument("--local-ranks", type=int, metavar="K", help="ranks of the machine")
    plan.add_argument("--micro-batches", type=int, default=1, metavar="M", help="of the predicted step")
    plan.add_argument("--checkpointing", action="store_true", dest="is_checkpointed", help="of its layers")
    about = "parameters that each of its tokens uses, such as 3.3e9 of a mixture of experts"
    plan.add_argument("--active", type=float, metavar="P", help=about)


def _plan(arguments: argparse.Namespace) -> None:
    from streamshard.config import parse_bytes, parse_precision
    from streamshard.tools.model_source import builder_of
    from streamshard.tools.plan import plan

    def of(names: str) -> dict[str, Any]:
        return {name: getattr(arguments, name) for name in names.split()}

    sizes = of("budget device_budget min_unit_size")
    for name, size in sizes.items():  # before the model is built, which takes seconds
        if size not in (None, 0):
            parse_bytes(name, size, at_least=name == "budget")
    if arguments.ranks is None and arguments.budget is None:
        raise ConfigError("give --ranks, or --budget for the fewest ranks that fit")
    machine, build = _machine(arguments), builder_of(arguments.model)
    step = None if machine is None else Step(machine, **of("micro_batches is_checkpointed active"))
    precision = dataclasses.replace(parse_precision(arguments.precision), **of("sums_in_rank_order"))
    given = {**of("min_unit_size offload device_budget shard_over_replicas"), "precision": precision}
    given |= of("units resident tp ep transport replicas weight_slots budget batch seq accumulate")
    planned = plan(build, arguments.ranks, step=step, **given)
    _print(planned, arguments.json)
    if planned.fit is not None and planned.fit.choice is None:
        raise StreamShardError("nothing fits the budget")


def _print(result: Any, as_json: bool) -> None:
    print(json.dumps(dataclasses.asdict(result), indent=2) if as_json else result)


def _machine(arguments: argparse.Namespace) -> Machine | None:
    """The machine that options describe; None: no option does."""
    units = {"link": "B/s", "host_memory": "B/s", "flops": ""}
    texts = {name: text for name in units if (text := getattr(arguments, name)) is not None}
    given: dict[str, Any] = {name: parse_rate(name, text, units[name]) for name, text in texts.items()}
    if arguments.local_ranks is not None:
        given["ranks"] = arguments.local_ranks
    if arguments.machine is not None:
        return dataclasses.replace(MACHINES[arguments.machine], **given)
    if given or arguments.micro_batches > 1 or arguments.is_checkpointed or arguments.active is not None:
        raise ConfigError(f"{_OF_STEP} change what --machine predicts: give --machine too")
    return None


def _doctor(arguments: argparse.Namespace) -> None:
    from streamshard.config import parse_precision
    from streamshard.tools.doctor import examine

    report = examine(parse_precision(arguments.precision))
    if report is None:  # the first rank prints for all
        return
    if arguments.json:
        _print(report, as_json=True)
    else:
        for finding in report.findings:
            _say(finding)
    if problems := sum(finding.level == "problem" for finding in report.findings):
        sys.stdout.flush()
        raise StreamShardError(f"{problems} problem{'s' * (problems > 1)} found")


def _inspect(arguments: argparse.Namespace) -> None:
    """Print a line for each checkpoint in DIR. If DIR is a checkpoint itself, also read and verify its files."""
    from streamshard.checkpoint.directory import is_checkpoint, no_checkpoint, open_verified, survey
    from streamshard.checkpoint.json_codec import dtype_name
    from streamshard.checkpoint.storage import parse_location
    from streamshard.comm.ranks import RankGroup

    root = parse_location("DIR", arguments.directory)
    if not (found := survey(root)):
        raise no_checkpoint(root, {})
    latest = max((entry for entry in found if not entry.wrong), key=lambda entry: entry.order, default=None)
    for entry in sorted(found, key=lambda entry: (len(entry.path.name), entry.path.name)):  # 9 before 10
        what = "damaged" if not entry.may_be_whole else "cannot be read"
        if (made := entry.manifest) is not None and not entry.wrong:
            saved = made.versions["saved_at"][: len("2000-01-01T00:00:00")].replace("T", " ")
            size = f"{sum(record.size_bytes for record in made.files) / 1e6:,.1f} MB"
            what = f"{saved} UTC  {made.world_size} rank(s)  {size}{', latest' if entry is latest else ''}"
        _say(f"{entry.path.name:<20}  {what}")
        if made is not None and arguments.tensors:
            for name, tensor in made.tensors.items():
                _say(f"  {name}  {dtype_name(tensor.dtype)}  {list(tensor.shape)}")
    sys.stdout.flush()  # before an error follows on the other stream
    if wrong := [entry.wrong for entry in found if entry.wrong]:
        raise CheckpointError("; ".join(wrong))
    if is_checkpoint(root):
        open_verified(root, RankGroup())
        _say("verified: all is as written")


def _compare(arguments: argparse.Namespace) -> None:
    from streamshard.tools.fingerprints import compare

    _say(compare(arguments.a, arguments.b))


def _convert(arguments: argparse.Namespace) -> None:
    from streamshard.checkpoint.dcp import from_dcp, to_dcp

    if arguments.to is not None:
        _say(f"{to_dcp(arguments.directory, arguments.out)} -> {arguments.out}")
        return
    keys = {"model": arguments.model_key, "optimizer": arguments.optimizer_key}
    path, left_out = from_dcp(arguments.directory, arguments.out, **keys)
    _say(f"{arguments.directory} -> {path}")
    if left_out:
        _say(f"left out: {', '.join(left_out)}")

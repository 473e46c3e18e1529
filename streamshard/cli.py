"""The command ``streamshard``: what can be done with a checkpoint by those who have no run of it."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

import torch

from streamshard.checkpoint.directory import checkpoints_in, holds_weights, newest_last, no_checkpoint
from streamshard.checkpoint.export import export_checkpoint
from streamshard.checkpoint.load import read_directory
from streamshard.checkpoint.manifest import CheckpointFiles, Manifest, check_sizes, read_manifest
from streamshard.checkpoint.safetensors_file import SUMS_NAME
from streamshard.comm.objects import SingleProcess
from streamshard.errors import CheckpointError, ConfigError, StreamShardError
from streamshard.log import printable, progress
from streamshard.version import __version__

__all__ = ["main"]

_FAILED, _USAGE, _INTERRUPTED = 1, 2, 130
_SHOWN_CHARACTERS = 72

_Row = tuple[str, str]
_Tensor = tuple[str, torch.dtype, tuple[int, ...]]

# Lines of 80 characters at most, as terminals have them.

_ABOUT = """\
Look at checkpoints, export their weights for Hugging Face, convert them from
and to FSDP2's. No GPU, no process group and no model code is needed.

A checkpoint is what streamshard.save_checkpoint("runs/llama", ...) writes, and
accelerator.save_state of StreamShardAccelerator: a directory such as
runs/llama/checkpoint-1000. Of runs/llama, export and convert take the latest."""

_EXAMPLES = """\
examples:
  streamshard inspect runs/llama                     which checkpoints there are
  streamshard inspect runs/llama/checkpoint-1000     what is in one
  streamshard export runs/llama llama-hf             for from_pretrained
  streamshard convert runs/llama llama-dcp --to dcp  for FSDP2: dcp.load

streamshard COMMAND --help has the options of each. Exit codes: 0 all is well,
1 an error (one line on standard error), 2 arguments that cannot work.
"""

_INSPECT = """\
Say what a checkpoint holds, and compare every byte of it with the checksums
that were written with it. Of a directory of checkpoints, a line for each;
"latest" is the one that load_checkpoint would take. An export, or another
Hugging Face directory, is shown too, and verified if checksums are beside it
(model.safetensors.crc32.json).

Ends with 0 if all that was looked at is as it was written, else with 1."""

_INSPECT_EXAMPLES = """\
examples:
  streamshard inspect runs/llama                                 all of them
  streamshard inspect runs/llama/checkpoint-1000 --tensors
  streamshard inspect runs/llama/checkpoint-1000 --no-verify     quick
  streamshard inspect llama-hf                                   an export
"""

_EXPORT = """\
Write a model's weights as a Hugging Face directory: safetensors files, and the
config if it is a model of transformers. They are, byte for byte, what
export_safetensors would have written when the checkpoint was saved;
from_pretrained("OUT") and load_safetensors(model, "OUT") read them.
The checkpoint is verified first. Memory: a few MB, however large the model."""

_EXPORT_EXAMPLES = """\
examples:
  streamshard export runs/llama llama-hf                     the latest one
  streamshard export runs/llama/checkpoint-1000 llama-hf --dtype bfloat16
  streamshard export runs/ppo policy-hf --model policy       one of several
"""


_CONVERT = """\
Turn a checkpoint into one of FSDP2's, a directory of
torch.distributed.checkpoint (DCP), or such a directory into a checkpoint.
Weights and the optimizer's state are converted, so that training goes on there,
or here; schedulers, random states and whatever else there is are left out.

  --to dcp          OUT is what dcp.save({"model": ..., "optimizer": ...}) would
                    write with what FSDP2's get_state_dict gives; dcp.load and
                    set_state_dict read it
  --to accelerate   as Accelerate has it: OUT/pytorch_model_fsdp_0, which
                    accelerate merge-weights reads, and OUT/optimizer_0
  --from dcp        DIR is either of these; OUT is a directory of checkpoints
                    and gains one, for load_checkpoint("OUT", model, optimizer)

Memory: one tensor at a time, of which --from dcp takes several copies.

DCP directories hold pickles, with which whoever made them can run code on the
machine that reads them. --from dcp reads plain data only and refuses the rest."""

_CONVERT_EXAMPLES = """\
examples:
  streamshard convert runs/llama llama-dcp --to dcp          the latest one
  streamshard convert runs/llama/checkpoint-1000 llama-acc --to accelerate
  streamshard convert fsdp2-run/step-1000 runs/llama --from dcp --step 1000
  streamshard convert app-run runs/llama --from dcp --model-key app.model
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: its arguments; None: those of the process.

    Returns:
        0; 1 after an error, which is on standard error in one line; 2 if the arguments cannot work.
    """
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # of `... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except (StreamShardError, OSError) as error:
        _say(f"streamshard {arguments.command}: {error}", sys.stderr)
        return _USAGE if isinstance(error, ConfigError) else _FAILED
    except KeyboardInterrupt:
        _say(f"streamshard {arguments.command}: interrupted", sys.stderr)
        return _INTERRUPTED
    return 0


def _say(text: object, stream: TextIO | None = None) -> None:
    """Print one line, of which strangers may have written a part: their checkpoint, or names in it."""
    print(printable(str(text)), file=stream)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("streamshard", description=_ABOUT, epilog=_EXAMPLES, formatter_class=_Formatter)
    parser.add_argument("--version", action="version", version=f"streamshard {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")

    def command(name: str, short: str, about: str, examples: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=short, description=about, epilog=examples, formatter_class=_Formatter)

    inspect = command(
        "inspect", "what is in a checkpoint, and whether it is as it was written", _INSPECT, _INSPECT_EXAMPLES
    )
    inspect.add_argument("directory", metavar="DIR", type=Path, help="a checkpoint, a directory of them, or an export")
    inspect.add_argument("--tensors", action="store_true", help="list all tensors: name, dtype, shape")
    inspect.add_argument(
        "--no-verify", action="store_true", help="look at the sizes of files only, not at what is in them"
    )
    inspect.set_defaults(run=_inspect)

    export = command("export", "a checkpoint's weights as a Hugging Face directory", _EXPORT, _EXPORT_EXAMPLES)
    export.add_argument(
        "directory", metavar="DIR", type=Path, help="a checkpoint, or a directory of them, whose latest is taken"
    )
    export.add_argument("out", metavar="OUT", type=Path, help="where to; an earlier export there is replaced")
    export.add_argument("--model", metavar="NAME", help="which one, if several were saved; inspect has their names")
    export.add_argument("--dtype", help="of floating-point weights, such as bfloat16 (default: as before sharding)")
    export.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        default="5GB",
        help="split files above, such as 500MB (default: %(default)s)",
    )
    export.set_defaults(run=_export)

    convert = command("convert", "a checkpoint into one of FSDP2's (DCP), or back", _CONVERT, _CONVERT_EXAMPLES)
    convert.add_argument("directory", metavar="DIR", type=Path, help="what is read: see --to and --from")
    convert.add_argument("out", metavar="OUT", type=Path, help="what is written; with --to, a new or empty directory")
    way = convert.add_mutually_exclusive_group(required=True)
    way.add_argument(
        "--to", choices=("dcp", "accelerate"), help="DIR is a checkpoint, or a directory of them, whose latest is taken"
    )
    way.add_argument(
        "--from", choices=("dcp",), dest="source", help="DIR is one of FSDP2's, OUT a directory of checkpoints"
    )
    convert.add_argument(
        "--step", type=int, metavar="N", help="with --from: the new checkpoint's number (default: the next)"
    )
    convert.add_argument("--model-key", metavar="KEY", default="model", help=_KEY_OF.format("weights"))
    convert.add_argument("--optimizer-key", metavar="KEY", default="optimizer", help=_KEY_OF.format("the optimizer"))
    convert.set_defaults(run=_convert)
    return parser


_KEY_OF = "with --from: what keys of {} begin with in DCP's files (default: %(default)s)"


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Texts as they are written, and options on the left up to a width at which most fit."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)


def _inspect(arguments: argparse.Namespace) -> None:
    root: Path = arguments.directory
    found = checkpoints_in(root)
    if not found and holds_weights(root):
        _inspect_weights(root, arguments)
    elif not found:
        raise no_checkpoint(root)
    elif found[0] == root:
        _inspect_one(root, arguments)
    else:
        _inspect_several(found, verifies=not arguments.no_verify)


def _inspect_one(path: Path, arguments: argparse.Namespace) -> None:
    manifest = read_manifest(path)
    _say(path)
    tensors = [(name, each.torch_dtype, each.shape) for name, each in manifest.tensors.items()]
    _say_what_is_inside(_describe(manifest), tensors, arguments)
    _verify(path, manifest, reads=not arguments.no_verify)
    _say(
        "not verified: files have the sizes they should have" if arguments.no_verify else "verified: all is as written"
    )


def _inspect_weights(root: Path, arguments: argparse.Namespace) -> None:
    with read_directory(root) as stored:
        _say(f"{root} is a Hugging Face directory")
        tensors = [(name, each.dtype, each.shape) for name, each in sorted(stored.stored.items())]
        numel = sum(math.prod(shape) for _, _, shape in tensors)
        files = len({each.file for each in stored.stored.values()})
        rows = [
            ("weights", f"{numel:,} numbers in {_counted(len(tensors), 'tensor')} ({_dtypes(tensors)})"),
            ("size", f"{_shown_bytes(sum(stored.sizes_bytes))} in {_counted(files, 'file')}"),
        ]
        _say_what_is_inside(rows, tensors, arguments)
        if stored.records is not None and not arguments.no_verify:
            with progress(f"verifying {root.name}", sum(stored.sizes_bytes), shows=True) as advance:
                stored.verify_share(0, 1, advance)
            stored.check_unchanged()
            _say("verified: the weights are as they were written")
        else:
            why = "" if arguments.no_verify else f"there are no checksums ({SUMS_NAME}); "
            _say(f"not verified: {why}files have the sizes they should have")


def _say_what_is_inside(rows: Sequence[_Row], tensors: Sequence[_Tensor], arguments: argparse.Namespace) -> None:
    for line in _in_columns(rows):
        _say(f"  {line}")
    if arguments.tensors:
        _say("tensors")
        for line in _in_columns([(name, _name_of(dtype), str(list(shape))) for name, dtype, shape in tensors]):
            _say(f"  {line}")
    sys.stdout.flush()  # before an error follows on the other stream


def _describe(manifest: Manifest) -> list[_Row]:
    """Name and content of each part of a checkpoint."""
    versions, state = manifest.versions, manifest.state
    replicas = f" in {manifest.replicas} replicas" if manifest.replicas > 1 else ""
    rows = [
        ("number", str(manifest.number)),
        ("saved", _saved_at(manifest)),
        ("by", f"streamshard {versions['streamshard']}, torch {versions['torch']}"),
        ("ranks", f"{manifest.world_size}{replicas}"),
        ("size", f"{_total_bytes(manifest)} in {_counted(len(manifest.files), 'file')}"),
    ]
    for name, saved in (*state["models"].items(), *state["optimizers"].items()):
        tensors = [
            (tensor, each.torch_dtype, each.shape)
            for tensor, each in manifest.tensors.items()
            if tensor.startswith(f"{name}/")
        ]
        what = f"{_counted(len(tensors), 'tensor')} ({_dtypes(tensors)})" if tensors else "no tensors"
        if "groups" in saved:
            keys = dict.fromkeys(key for own in saved["state"].values() for key in own)
            what = f"{_counted(len(saved['groups']), 'group')}, {', '.join(keys) or 'no state yet'}, {what}"
        elif "error" in saved["export"]:
            what += "; cannot be exported from here"
        rows.append((name, f"{saved['class'] or 'of unknown class'}, {what}"))
    for name, tree in state["trees"].items():
        differs = "" if "all" in tree else f"differs between {len(tree['ranks'])} ranks; "
        shown = differs + json.dumps(tree["all"] if "all" in tree else tree["ranks"][0], ensure_ascii=False)
        rows.append((name, shown if len(shown) <= _SHOWN_CHARACTERS else shown[: _SHOWN_CHARACTERS - 3] + "..."))
    return rows


def _dtypes(tensors: Iterable[_Tensor]) -> str:
    by_dtype: dict[str, int] = {}
    for _, dtype, shape in tensors:
        name = _name_of(dtype)
        by_dtype[name] = by_dtype.get(name, 0) + math.prod(shape) * dtype.itemsize
    largest_first = sorted(by_dtype.items(), key=lambda item: -item[1])
    return ", ".join(f"{name}, {_shown_bytes(size)}" for name, size in largest_first)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _saved_at(manifest: Manifest) -> str:
    """When, to the second, in UTC."""
    return manifest.versions["saved_at"][: len("2000-01-01T00:00:00")].replace("T", " ") + " UTC"


def _total_bytes(manifest: Manifest) -> str:
    """Of all files but the manifest."""
    return _shown_bytes(sum(record.size_bytes for record in manifest.files))


def _shown_bytes(count: int) -> str:
    """In the largest unit of which there is one at least."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _inspect_several(paths: Sequence[Path], *, verifies: bool) -> None:
    whole: list[tuple[tuple[int, int, bool], Path]] = []
    told: dict[Path, list[str]] = {}
    errors: list[str] = []
    for path in paths:
        told[path] = [path.name, "?", "?", "?"]
        try:
            manifest = read_manifest(path)
            size = _total_bytes(manifest)
            told[path][1:] = [_saved_at(manifest), _counted(manifest.world_size, "rank"), size]
            _verify(path, manifest, reads=verifies)
        except CheckpointError as error:
            errors.append(str(error))
            told[path].append("damaged")
        else:
            whole.append((newest_last(path, manifest), path))
            told[path].append("verified" if verifies else "not verified")
    if whole:
        told[max(whole)[-1]][-1] += ", latest"
    for line in _in_columns([told[path] for path in sorted(paths, key=_number_and_name)]):
        _say(line)
    if errors:
        sys.stdout.flush()
        raise CheckpointError("; ".join(errors))


def _number_and_name(path: Path) -> tuple[int, str]:
    digits = path.name.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else -1, path.name


def _verify(path: Path, manifest: Manifest, *, reads: bool) -> None:
    """Raise a CheckpointError that names the file that is missing or damaged; without `reads`, of another size."""
    check_sizes(path, manifest)
    if reads:
        with CheckpointFiles(path, manifest) as files:
            files.verify_together(SingleProcess())


def _export(arguments: argparse.Namespace) -> None:
    done = export_checkpoint(
        arguments.directory, arguments.out, arguments.model, arguments.dtype, arguments.max_shard_size
    )
    _say(f"{done.path} -> {arguments.out}: {', '.join(done.files)}")
    if done.custom_code is not None:
        _say(f"{done.custom_code} has code that is not in transformers, nor here: put its .py files beside the weights")


def _convert(arguments: argparse.Namespace) -> None:
    # Here, because torch takes a second to import it.
    from streamshard.checkpoint.dcp import from_dcp, to_dcp

    if arguments.to is not None:
        path = to_dcp(arguments.directory, arguments.out, accelerate=arguments.to == "accelerate")
        _say(f"{path} -> {arguments.out}")
        return
    if arguments.step is not None and arguments.step < 0:
        raise ConfigError(f"--step={arguments.step}: wanted 0 or more")
    keys = {"model": arguments.model_key, "optimizer": arguments.optimizer_key}
    done = from_dcp(arguments.directory, arguments.out, **keys, step=arguments.step)
    _say(f"{arguments.directory} -> {done.path}")
    if done.left_out:
        _say(f"left out: {', '.join(done.left_out)}")

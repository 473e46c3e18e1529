"""Digests of a run's numbers in each step, the same on any number of ranks, and where two runs begin to differ.

    with fingerprints(model, "a.jsonl") as note:
        ...
        note(loss)

A digest is a `sum_of_bits`, which does not depend on how elements are cut over ranks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from streamshard.comm.ranks import run_on_all_ranks
from streamshard.core.engine import Engine
from streamshard.core.module_state import engine_at_rest
from streamshard.core.optimizer_kinds import params_in
from streamshard.core.params import Param
from streamshard.errors import ConfigError, StreamShardError
from streamshard.guards.sharded_parameter import data_of, grad_of
from streamshard.nested import sum_of_bits
from streamshard.torch_private import AsTensors

_FORMAT = 3
_KINDS = ("gradients", "weights")


class _Writer:
    """Writes a line per optimizer step.

    Args:
        engine: of the model.
        file: on the first rank.
    """

    def __init__(self, engine: Engine, file: TextIO | None) -> None:
        self._engine, self._file = engine, file
        self._params = {param.sharded: param for param in engine.params}
        self._steps = 0
        self._losses = torch.zeros(2, dtype=torch.int64, device=engine.streams.device)  # their digest, their number
        self._grads: dict[Param, torch.Tensor | None] = {}

    def note(self, loss: torch.Tensor) -> None:
        """A loss of the step: one number."""
        device = self._losses.device
        self._losses[0] += sum_of_bits(loss.double()).to(device)
        self._losses[1] += 1

    def before_step(self, optimizer: Any, *given: Any) -> None:
        """An optimizer is about to step: gradients are final."""
        for param in self._stepped(optimizer):
            param.piece.settle()  # with `offload` clipping comes late
            has_grad = param.sharded.grad is not None
            self._grads[param] = self._own(param, grad_of(param.sharded)) if has_grad else None

    def after_step(self, optimizer: Any, *given: Any) -> None:
        """It has stepped. Collective."""
        if not (params := self._stepped(optimizer)):  # of another model
            return
        found: dict[tuple[Param, str], torch.Tensor] = {}
        for param in params:
            param.piece.settle()
            if (grad := self._grads.pop(param, None)) is not None:
                found[param, "gradients"] = grad
            found[param, "weights"] = self._own(param, data_of(param.sharded))
        digests = torch.stack([*self._losses, *found.values()])
        self._engine.ranks.all_reduce(digests)  # sums of int64 wrap around: their order changes no bit
        self._losses.zero_()
        losses, count, *others = (f"{digest & (1 << 64) - 1:016x}" for digest in digests.tolist())
        if self._file is not None:
            line: dict[str, Any] = {"step": self._steps, "losses": {"": f"{losses} of {int(count, 16)}"}}
            line |= {kind: {} for kind in _KINDS}
            for (param, kind), digest in zip(found, others, strict=True):
                line[kind][param.name] = digest
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()  # so that a killed run leaves its steps
        self._steps += 1

    def _stepped(self, optimizer: Any) -> list[Param]:
        return [self._params[param] for param in params_in(optimizer.param_groups) if param in self._params]

    def _own(self, param: Param, values: torch.Tensor) -> torch.Tensor:
        """The part of a digest that this rank adds: copies count once."""
        with AsTensors():
            own = sum_of_bits(values.as_subclass(torch.Tensor).to(self._engine.streams.device), param.local.start)
        return own if param.piece.counts else own.zero_()


@contextlib.contextmanager
def fingerprints(model: nn.Module, path: str | Path) -> Iterator[Callable[[torch.Tensor], None]]:
    """Write digests of gradients and weights at each optimizer step inside. Collective.

    Runs of the same numbers write the same digests, on any number of ranks. ``streamshard compare A B`` says where two
    files begin to differ. A step takes longer, by about the time of reading both once.

    Args:
        model: made by `StreamShard`.
        path: of a new file, a few hundred bytes per parameter and step. The first rank writes it.

    Yields:
        A function that notes a loss of the step, one number, whose digest is written too.

    Raises:
        ConfigError: on all ranks: the file cannot be written.
        ShardingError: `model` was not sharded by StreamShard.
    """
    engine = engine_at_rest(model, "fingerprints()")

    def opened() -> TextIO | None:
        if not engine.ranks.is_first:
            return None
        try:
            Path(path).write_text(json.dumps({"streamshard fingerprints": _FORMAT}) + "\n")
        except OSError as error:
            raise ConfigError(f"path={str(path)!r}: {error.strerror}") from error
        return stack.enter_context(Path(path).open("a"))

    with contextlib.ExitStack() as stack:
        writer = _Writer(engine, run_on_all_ranks(engine.ranks, "write fingerprints", opened, ConfigError))
        stack.callback(register_optimizer_step_pre_hook(writer.before_step).remove)
        stack.callback(register_optimizer_step_post_hook(writer.after_step).remove)
        yield writer.note


# -- two files --------------------------------------------------------------------------------------------------------


def compare(first: Path, second: Path) -> str:
    """Compare two files of `fingerprints`.

    Returns:
        That they are equal, as far as both go.

    Raises:
        StreamShardError: they differ; names the first step, and what differs in it: losses before gradients, gradients
            before weights. If weights differ behind equal gradients, the optimizers' options or states did.
    """
    one, other = _digests_in(first), _digests_in(second)
    for step in sorted(one.keys() & other.keys()):
        for kind in ("losses", *_KINDS):
            mine, theirs = one[step][kind], other[step][kind]
            if differing := [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]:
                what = "losses" if kind == "losses" else f"{kind} of {differing[0]!r}"
                more = f" and {len(differing) - 1} more" if differing[1:] else ""
                raise StreamShardError(f"step {step} differs first: {what}{more}. All before is equal")
    steps = len(one.keys() & other.keys())
    if not steps:
        raise StreamShardError("the files have no step in common")
    rest = "" if len(one) == len(other) else f"; {first} has {len(one)} steps, {second} {len(other)}"
    return f"equal: {steps} steps, {len(one[0]['weights'])} parameters{rest}"


def _digests_in(path: Path) -> dict[int, dict[str, dict[str, str]]]:
    """By step and kind, the digests by name. A killed run may have left a last line without its end."""
    try:
        header, *lines = map(json.loads, path.read_text().split("\n")[:-1])
        if header["streamshard fingerprints"] != _FORMAT:
            raise StreamShardError(f"{path}: of another version of StreamShard")
        return {line["step"]: {kind: line[kind] for kind in ("losses", *_KINDS)} for line in lines}
    except (ValueError, KeyError, TypeError) as error:
        raise StreamShardError(f"{path}: no file of fingerprints()") from error

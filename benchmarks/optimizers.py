"""Every optimizer that is installed: under StreamShard it equals plain PyTorch, or it is refused by name.

    python benchmarks/optimizers.py [--ranks 2 3] [--only NAME ..] [--out FILE]

Looks for optimizer classes in torch.optim and in the packages of `PACKAGES` that are installed. Each is tried in two
ways: as it is, over the parameters of a sharded model (*direct*), and inside `WholeParameterOptimizer` (*whole*). The
model is a small transformer with a scalar, a vector, a one-element, a stacked and, on some ranks, an empty parameter.
All ranks have the same batch, and plain PyTorch rounds gradients as the mean over ranks does: they are equal to the
bit.

Outcomes: ``bits`` (all weights equal), ``rounding`` (equal up to rounding), ``refused`` (a StreamShardError that names
the optimizer), ``no plain`` (it does not train this model without StreamShard either). Anything else is WRONG, and the
exit code counts those. One case takes a second on two cores.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import inspect
import io
import json
import os
import pkgutil
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
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compilers do not survive the fork; what they compile runs as it is

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from streamshard import Precision, StreamShard, StreamShardError
from streamshard.comm.transport import sum_in_rank_order
from streamshard.optim import WholeParameterOptimizer

PACKAGES = (
    *("torch.optim", "pytorch_optimizer", "timm.optim", "torchao.optim", "bitsandbytes.optim", "schedulefree"),
    *("lion_pytorch", "heavyball", "muon", "galore_torch", "apollo_torch", "came_pytorch", "torch_optimizer"),
    *("prodigyopt", "dadaptation", "transformers.optimization", "dion", "muonium", "kron_torch"),
)
STEPS, CASE_S = 4, 60
DIM, VOCABULARY = 16, 24


class Block(nn.Module):
    """A layer with a matrix of each kind, stacked experts, a scalar and a vector of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        # No bias: that of keys has no gradient but rounding, which optimizers that normalise blow up.
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)
        self.experts = nn.Parameter(torch.randn(2, DIM, DIM) / DIM)
        self.scale, self.one = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, DIM] to the same."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)) * self.one
        return x + torch.einsum("btd,edf->btf", x, self.experts).tanh() * self.scale


class Model(nn.Module):
    """A transformer; most of its parameters are too small for all ranks to have some."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCABULARY)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Next-token loss of [B, T] tokens."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    forward = loss


class Case(NamedTuple):
    """One optimizer's class, and what it is constructed with."""

    kind: type[Optimizer]
    options: dict[str, Any]
    matrices_only: bool

    @property
    def name(self) -> str:
        """By module and class."""
        return f"{self.kind.__module__}.{self.kind.__qualname__}"

    def params(self, model: nn.Module) -> list[nn.Parameter]:
        """Those that it is for."""
        return [param for param in model.parameters() if param.ndim == 2 or not self.matrices_only]


def find_classes() -> Iterator[type[Optimizer]]:
    """Each class once, by package."""
    seen: set[type] = {Optimizer}
    for package in PACKAGES:
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                module = importlib.import_module(package)
        except (Exception, SystemExit) as error:
            print(f"not tried: {package}: {type(error).__name__}: {str(error)[:90]}")
            continue
        modules = [module]
        for found in pkgutil.iter_modules(getattr(module, "__path__", ())):
            with contextlib.suppress(Exception, SystemExit), contextlib.redirect_stdout(io.StringIO()):
                modules.append(importlib.import_module(f"{package}.{found.name}"))
        for each in modules:
            for value in vars(each).values():
                is_new = isinstance(value, type) and issubclass(value, Optimizer) and value not in seen
                if is_new and value.__module__.startswith(package.partition(".")[0]) and not inspect.isabstract(value):
                    seen.add(value)
                    yield value


def make_case(kind: type[Optimizer]) -> Case | str:
    """How plain PyTorch trains the model with it; or why it does not."""
    takes = inspect.signature(kind.__init__).parameters
    why = ""
    for matrices_only in (False, True):
        for options in ({"lr": 0.01}, {}):
            if "lr" in options and "lr" not in takes and not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
                continue
            case = Case(kind, options, matrices_only)
            try:
                weights = train(case, "plain", 1)
            except Exception as error:
                why = why or f"{type(error).__name__}: {str(error)[:100]}"
                continue
            if all(torch.isfinite(each).all() for each in weights.values()):
                return case
            why = why or "weights are not finite"
    return why or "cannot be constructed"


def train(case: Case, way: str, world_size: int) -> dict[str, torch.Tensor]:
    """Weights after a few steps, on every rank."""
    torch.manual_seed(0)
    model: Any = Model()
    if way != "plain":
        model = StreamShard(model, units=[Block], precision=Precision(param_dtype=torch.float32))
    params = case.params(model)
    wanted = {id(param) for param in params}
    others = [param for param in model.parameters() if id(param) not in wanted]
    optimizers: list[Any] = [torch.optim.SGD(others, lr=0.01)] if others else []
    if way == "whole":
        optimizers.append(WholeParameterOptimizer(params, case.kind, round_size=2048, **case.options))
    else:
        optimizers.append(case.kind(params, **case.options))
    torch.manual_seed(1)
    for step in range(STEPS):
        tokens = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(step))
        model(tokens).backward()
        if way == "plain":
            _round_as_ranks_do(model, world_size)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = model.state_dict() if way == "plain" else model.full_state_dict(rank0_only=False)
    return {name: value.detach().clone() for name, value in state.items()}


def _round_as_ranks_do(model: nn.Module, world_size: int) -> None:
    """The mean of equal gradients of three ranks is not that gradient, but for rounding."""
    for param in model.parameters():
        if param.grad is not None:
            grad = param.grad.view(-1)
            sum_in_rank_order([grad.clone()] * world_size, grad, accumulate=False, divisor=world_size)


def compare(case: Case, found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> str:
    """``bits``, ``rounding``, or what differs."""
    torch.manual_seed(0)
    start = Model().state_dict()
    worst, where = 0.0, ""
    for name, value in wanted.items():
        change = float((value - start[name]).abs().max()) + 1e-7
        off = float((found[name] - value).abs().max()) / change
        if not off <= worst:
            worst, where = off, name
    if not where:
        return "bits"
    return "rounding" if worst < 1e-3 else f"WRONG: {where} is off by {worst:.1e} of its change"


def run_case(case: Case, way: str, world_size: int, wanted: dict[str, torch.Tensor]) -> str:
    """The outcome on the first rank, in processes of their own: a crash or a hang is an outcome too."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world_size):
            child = os.fork()
            if child == 0:
                _run_rank(case, way, rank, world_size, wanted, Path(folder))
            children.append(child)
        deadline = time.monotonic() + CASE_S
        left = set(children)
        while left and time.monotonic() < deadline:
            for child in list(left):
                if os.waitpid(child, os.WNOHANG)[0]:
                    left.discard(child)
            time.sleep(0.01)
        for child in left:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        outcomes = {path.read_text() for path in Path(folder).glob("[0-9]*")}
        if left:
            return f"WRONG: hangs ({'; '.join(sorted(outcomes))[:200]})"
        kinds = sorted({outcome.partition(":")[0] for outcome in outcomes})
        if len(kinds) != 1 and set(kinds) != {"bits", "rounding"}:
            return f"WRONG: ranks differ: {'; '.join(sorted(outcomes))[:300]}" if kinds else "WRONG: crashed"
        return "rounding" if len(kinds) == 2 else sorted(outcomes)[0]


def _run_rank(case: Case, way: str, rank: int, world_size: int, wanted: Any, folder: Path) -> None:
    outcome = "WRONG: no outcome"
    try:
        sys.stdout = sys.stderr = io.StringIO()
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
        try:
            outcome = compare(case, train(case, way, world_size), wanted)
        except StreamShardError as error:
            is_named = case.kind.__name__ in str(error)
            outcome = f"{'refused' if is_named else 'WRONG: unnamed'}: {type(error).__name__}: {error}"
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            outcome = f"WRONG: {type(error).__name__}: {str(error)[:200]} ({place.filename}:{place.lineno})"
    finally:
        (folder / f"{rank}").write_text(outcome)
        os._exit(0)


def main() -> int:
    """Print a line for each case and the counts; the number of wrong ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--ways", nargs="+", default=["direct", "whole"], choices=["direct", "whole"])
    parser.add_argument("--only", nargs="+", default=[], help="parts of names")
    parser.add_argument("--out", type=Path, help="a JSON file of all outcomes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    outcomes: dict[str, dict[str, str]] = {}
    for kind in find_classes():
        name = f"{kind.__module__}.{kind.__qualname__}"
        if given.only and not any(part in name for part in given.only):
            continue
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            case = make_case(kind)
        if isinstance(case, str):
            print(f"{name}: no plain: {case}", flush=True)
            counts["plain"]["no plain"] += 1
            continue
        wanted = {size: train(case, "plain", size) for size in given.ranks}
        again = compare(case, train(case, "plain", given.ranks[0]), wanted[given.ranks[0]])
        if again != "bits":
            print(f"{name}: no plain: two runs of plain PyTorch differ", flush=True)
            counts["plain"]["no plain"] += 1
            continue
        counts["plain"]["trains"] += 1
        for way in given.ways:
            for world_size in given.ranks:
                outcome = run_case(case, way, world_size, wanted[world_size])
                outcomes.setdefault(name, {})[f"{way}, {world_size} ranks"] = outcome
                counts[f"{way}, {world_size} ranks"][outcome.partition(":")[0]] += 1
                if not outcome.startswith(("bits", "rounding")):
                    print(f"{name}, {way}, {world_size} ranks: {outcome[:260]}", flush=True)
    for what, each in counts.items():
        print(f"{what}: {dict(each)}")
    if given.out:
        given.out.write_text(json.dumps({"counts": counts, "outcomes": outcomes}, indent=1))
    return sum(each["WRONG"] for each in counts.values())


if __name__ == "__main__":
    sys.exit(main())

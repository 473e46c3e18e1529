"""Whether a link hides behind compute: to host memory (``offload``), or to other ranks. Arithmetic on given speeds.

With ``offload`` the forward of a step's first micro-batch carries out the last optimizer step beside its layers, so it
copies the most. Bytes for each element that trains in bf16, in (to the device) and out:

    first forward       in 16: main weights 4, main grads 4, Adam's moments 8
                        out 14: main weights, moments, and the new all-gather input 2
    further forwards    in 2: the all-gather input
    first backward      in 2, out 4: main grads
    further backwards   in 6, out 4: main grads are added to

Frozen weights come in as in further forwards. A unit that is still in its weight slot does not come in again, unless
the optimizer has stepped it.

Without ``offload`` the link is that to other ranks. Weights are all-gathered in each forward and backward, and
gradients reduced in each backward. A rank sends as many bytes as it receives.

`model.accumulate` runs all micro-batches of a step in one forward and backward, with the bytes of one micro-batch.

FLOPs of a token are those of PaLM (arXiv:2204.02311, appendix B), with half the attention, as it is causal:

    forward     2 x used parameters + 2 x layers x width x tokens of a sequence
    backward    twice the forward, less 2 x used parameters that are frozen; checkpointed layers repeat the forward

Without frozen parameters these are 6 x used parameters and attention, or 8 x with checkpointing. The assumptions:

- In a pass compute, the link in each direction and host memory work side by side, so the slowest takes the whole pass.
  The first and the last unit, which have nothing to hide behind, are left out.
- The link is as fast in one direction when the other one is busy. A byte on the link is read or written once in host
  memory. Nothing else uses host memory, which the ranks of a machine share equally.
- All kernels compute at the given rate. With ``offload`` collectives hide. The optimizer is Adam, whose kernels take no
  time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from streamshard.errors import ConfigError, want_positive


@dataclass(frozen=True)
class Machine:
    """The speeds that count.

    Attributes:
        link: bytes per second between a rank and host memory, or other ranks, in each direction while both are busy.
        host_memory: bytes per second that all ranks of the machine read and write in its memory. None: no limit.
        flops: FLOP per second of a rank in training.
        ranks: of the machine.

    Raises:
        ConfigError: a number is not positive.
    """

    link: float
    host_memory: float | None
    flops: float
    ranks: int = 1

    def __post_init__(self) -> None:
        want_positive(vars(self))

    def __str__(self) -> str:
        ranks = f" for {self.ranks} ranks" if self.ranks > 1 else ""
        memory = "" if self.host_memory is None else f"host memory {self.host_memory / 1e9:.3g} GB/s{ranks}, "
        return f"link {self.link / 1e9:.3g} GB/s each way, {memory}{self.flops / 1e12:.3g} TFLOP/s"


MACHINES: Mapping[str, Machine] = {  # round figures; `streamshard doctor` measures
    "pcie4": Machine(20e9, 150e9, 200e12),
    "pcie5": Machine(48e9, 150e9, 400e12),
    "pcie5x8": Machine(48e9, 450e9, 400e12, ranks=8),
    "gh200": Machine(350e9, 500e9, 600e12),
}


def parse_rate(name: str, text: str, unit: str) -> float:
    """Read a rate from text such as "50GB/s", whose `unit` is "B/s", or "400T", without a unit.

    Raises:
        ConfigError: `text` is no such text. The message calls it `name`.
    """
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)([GTP]){unit}", text)
    if match is None:
        raise ConfigError(f"{name}={text!r}: wanted a number and {', '.join(prefix + unit for prefix in 'GTP')}")
    return float(match[1]) * {"G": 1e9, "T": 1e12, "P": 1e15}[match[2]]


@dataclass(frozen=True)
class HostBytes:
    """What a rank has in host memory.

    Attributes:
        trained: elements that train.
        cast: bytes of their all-gather inputs; 0: these are the main weights themselves.
        first_forward: bytes of frozen weights that come in.
        forward, backward: bytes of all-gather inputs that come in, in further forwards and in each backward.
    """

    trained: int
    cast: int
    first_forward: int
    forward: int
    backward: int

    def copies(self, passes: int) -> Iterator[tuple[str, int, int, int]]:
        """Each kind of pass, of so many forwards and backwards: its name, how often, bytes in, bytes out."""
        grads = 4 * self.trained
        yield "first forward", 1, 4 * grads + self.first_forward, 3 * grads + self.cast
        yield "first backward", 1, self.backward, grads
        if passes > 1:
            yield "further forward", passes - 1, self.forward, 0
            yield "further backward", passes - 1, self.backward + grads, grads


@dataclass(frozen=True)
class Exchanged:
    """What a rank sends to other ranks; it receives as much.

    Attributes:
        forward, backward: bytes of the weights that each of them all-gathers.
        reduced: bytes of gradients.
        keeps_weights, keeps_grads: inside ``no_sync()``, around all passes but the last, weights stay, or gradients
            wait.
    """

    forward: int
    backward: int
    reduced: int
    keeps_weights: bool
    keeps_grads: bool

    def copies(self, passes: int) -> Iterator[tuple[str, int, int, int]]:
        """See `HostBytes.copies`."""
        # The first pass gathers, and the last one, which is outside of `no_sync()`.
        gathering, reducing = min(passes, 2 if self.keeps_weights else passes), 1 if self.keeps_grads else passes
        for name, count, n_bytes in (
            ("forward", gathering, self.forward),
            ("forward in no_sync", passes - gathering, 0),
            ("backward", reducing, self.backward + self.reduced),
            ("backward in no_sync", passes - reducing, self.backward),
        ):
            if count:
                yield name, count, n_bytes, n_bytes

    def sent_bytes(self, passes: int) -> int:
        """Of so many forwards and backwards."""
        return sum(count * out_bytes for _, count, _, out_bytes in self.copies(passes))


@dataclass(frozen=True)
class Load:
    """What a rank computes in a step.

    Attributes:
        used: parameters that each token uses. Of a mixture of experts, those of the experts that a token visits.
        trained: of these, those that train.
        layers, width: of the attention.
        batch, seq: shape of a micro-batch of tokens.
        micro_batches: of a step.
        is_checkpointed: backward repeats the forward.
        is_layer_major: they run layer by layer, in one pass.
    """

    used: float
    trained: float
    layers: int
    width: int
    batch: int
    seq: int
    micro_batches: int = 1
    is_checkpointed: bool = False
    is_layer_major: bool = False

    @property
    def passes(self) -> int:
        """Forwards of a step, and backwards."""
        return 1 if self.is_layer_major else self.micro_batches

    @property
    def pass_tokens(self) -> int:
        """Of each of them."""
        return self.batch * self.seq * self.micro_batches // self.passes

    @property
    def forward_flops(self) -> float:
        """Of a token."""
        return 2 * self.used + 2 * self.layers * self.width * self.seq

    @property
    def backward_flops(self) -> float:
        """Of a token."""
        return (2 + self.is_checkpointed) * self.forward_flops - 2 * (self.used - self.trained)


@dataclass(frozen=True)
class Step:
    """A step whose time is predicted.

    Attributes:
        machine: on which it runs.
        micro_batches: of the step.
        is_checkpointed: its layers are checkpointed.
        active: parameters that a token uses, of a mixture of experts. None: all parameters outside of embeddings.

    Raises:
        ConfigError: a number is not positive.
    """

    machine: Machine
    micro_batches: int = 1
    is_checkpointed: bool = False
    active: float | None = None

    def __post_init__(self) -> None:
        want_positive({"micro_batches": self.micro_batches, "active": self.active})


@dataclass(frozen=True)
class PassTime:
    """A forward or backward of a micro-batch, or of all of them.

    Attributes:
        name, count: which one, and how often a step has it.
        in_bytes, out_bytes: over the link, to the device and from it. Host memory moves the sum.
        seconds: what each limit takes alone: "computing", "link in", "link out", "host memory".
        hidden_tokens: tokens of the pass from which computing takes the longest.
    """

    name: str
    count: int
    in_bytes: int
    out_bytes: int
    seconds: Mapping[str, float]
    hidden_tokens: float

    @property
    def limit(self) -> str:
        """What takes the longest."""
        return max(self.seconds, key=self.seconds.__getitem__)

    @property
    def exposed_s(self) -> float:
        """In a step, time that does not hide behind computing."""
        return self.count * (self.seconds[self.limit] - self.seconds["computing"])


@dataclass(frozen=True)
class StepTime:
    """What `predict` returns. Printable.

    Attributes:
        machine, load: the arguments.
        passes: the kinds of passes of a step.
        step_s, computing_s: the time of a step with all copies, and of its computing alone.
        hidden_tokens: tokens of a pass from which all copies hide.
        limit: what takes the longest in the pass that copies delay most. "computing": all copies hide.
        advice: what helps; empty if all copies hide.
    """

    machine: Machine
    load: Load
    passes: Sequence[PassTime]
    step_s: float
    computing_s: float
    hidden_tokens: int
    limit: str
    advice: Sequence[str]

    def __str__(self) -> str:
        load, sums = self.load, [sum(each.count * each.in_bytes for each in self.passes)]
        sums.append(sum(each.count * each.out_bytes for each in self.passes))
        going_in, out, both = (f"{n_bytes / 1e9:.2f} GB" for n_bytes in (*sums, sum(sums)))
        way, uses_host = " by model.accumulate" * load.is_layer_major, self.machine.host_memory is not None
        lines = [
            f"a step of {load.micro_batches} x {load.batch * load.seq:,} tokens{way}, estimated: {self.machine}",
            f"over the link {going_in} in, {out} out" + f"; in host memory {both}" * uses_host,
            f"{'seconds':<24}" + "".join(f"{name:>12}" for name in self.passes[0].seconds),
        ]
        for each in self.passes:
            name = f"  {each.count} x {each.name}" if each.count > 1 else f"  {each.name}"
            lines.append(f"{name:<24}" + "".join(f"{seconds:>12.4g}" for seconds in each.seconds.values()))
        share = self.computing_s / self.step_s
        lines.append(f"takes {self.step_s:.4g} s, {share:.0%} of the speed of computing alone; limit: {self.limit}")
        what = "step" if load.is_layer_major else "micro-batch"
        lines.append(f"all copies hide from {self.hidden_tokens:,} tokens in a {what}")
        return "\n".join([*lines, *(f"what helps: {each}" for each in self.advice)])


def predict(inputs: HostBytes | Exchanged, load: Load, machine: Machine) -> StepTime:
    """The time of a step, by the model of this file."""
    passes = [_time(*copied, load, machine) for copied in inputs.copies(load.passes)]
    computing_s = sum(each.count * each.seconds["computing"] for each in passes)
    worst = max(passes, key=lambda each: each.exposed_s)
    hidden_tokens, advice = math.ceil(max(each.hidden_tokens for each in passes)), []
    if worst.exposed_s > 0:
        larger = "larger micro-batches" + " rather than more" * (load.micro_batches > 1)
        advice.append("more tokens in a step" if load.is_layer_major else larger)
    if worst.exposed_s > 0 and isinstance(inputs, HostBytes):
        if worst is passes[0] and 16 * inputs.trained > inputs.first_forward:  # else most bytes are frozen weights
            share = 1 - worst.seconds["computing"] / worst.seconds[worst.limit]
            advice.append(f"device_budget: with {share:.0%} of the state on the device, copies of the rest hide")
            advice.append("fewer trained parameters, as with LoRA: their step hides beside one forward only")
        if worst.limit != "host memory":  # which ranks share
            advice.append("more ranks: each has a link, and copies less")
    step_s = computing_s + sum(each.exposed_s for each in passes)
    limit = worst.limit if advice else "computing"
    return StepTime(machine, load, passes, step_s, computing_s, hidden_tokens, limit, advice)


def _time(name: str, count: int, in_bytes: int, out_bytes: int, load: Load, machine: Machine) -> PassTime:
    flops = load.forward_flops if "forward" in name else load.backward_flops
    copying = {"link in": in_bytes / machine.link, "link out": out_bytes / machine.link}
    if machine.host_memory is not None:
        copying["host memory"] = (in_bytes + out_bytes) * machine.ranks / machine.host_memory
    seconds = {"computing": load.pass_tokens * flops / machine.flops, **copying}
    return PassTime(name, count, in_bytes, out_bytes, seconds, max(copying.values()) * machine.flops / flops)

"""torch's state of a thread, which forwards that take turns in one thread must not see of each other.

Code around a layer may have disabled gradients, entered autocast, a mode or saved-tensor hooks (a checkpoint around
several layers), or seeded the random numbers. It leaves these contexts when its forward goes on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from streamshard.device import generators_of, has_streams, module_of
from streamshard.torch_private import THREAD_STACKS


class ThreadState(NamedTuple):
    """See the module.

    Attributes:
        makes_graph: gradients are enabled.
        autocast: for each kind of device, whether autocast is enabled, and its dtype.
        stacks: the saved-tensor hooks, modes of functions and modes of dispatch that are entered, innermost last.
        device: of the model.
        random: states of the random number generators of the host and of the device.
        stream: the device's current one; None on the CPU.
    """

    makes_graph: bool
    autocast: dict[str, tuple[bool, torch.dtype]]
    stacks: tuple[list[Any], ...]
    device: torch.device
    random: list[torch.Tensor]
    stream: Any

    def put(self) -> None:
        """Enter this state. The thread has no hooks and modes."""
        torch.set_grad_enabled(self.makes_graph)
        for kind, (is_enabled, dtype) in self.autocast.items():
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.clear_autocast_cache()  # of casts of weights that only the segment before has used
        for stack, entries in zip(THREAD_STACKS, self.stacks, strict=True):
            for entry in entries:
                stack.push(entry)
        for generator, state in zip(generators_of(self.device), self.random, strict=True):
            generator.set_state(state)
        if self.stream is not None:
            module_of(self.device).set_stream(self.stream)


def take_state(device: torch.device) -> ThreadState:
    """The state of this thread, which has no hooks and modes afterwards."""
    kinds = dict.fromkeys(("cpu", device.type))
    autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
    stacks = tuple(stack.take() for stack in THREAD_STACKS)
    random = [generator.get_state() for generator in generators_of(device)]
    stream = module_of(device).current_stream(device) if has_streams(device) else None
    return ThreadState(torch.is_grad_enabled(), autocast, stacks, device, random, stream)


def with_other_numbers(state: ThreadState, count: int) -> Sequence[ThreadState]:
    """`count` states with different random numbers. The first is `state` itself."""
    told = b"".join(each.numpy().tobytes() for each in state.random)  # a forward advances one of them, or none
    seeds = torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(told, digest_size=7).digest(), "big"))
    states = [state]
    for seed in torch.randint(2**62, (count - 1,), generator=seeds).tolist():
        fresh = [torch.Generator(generator.device).manual_seed(seed) for generator in generators_of(state.device)]
        states.append(state._replace(random=[generator.get_state() for generator in fresh]))
    return states

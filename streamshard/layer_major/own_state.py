"""What forwards that take turns in one thread must not see of each other: torch's state of the thread, and attributes.

- Code around a layer may have disabled gradients, entered autocast, a mode or saved-tensor hooks (a checkpoint around
  several layers), or seeded the random numbers. It leaves these contexts when its forward goes on.
- A forward may put a mask or an auxiliary loss into an attribute, for code behind a later layer. Modules around layers
  are watched. Numbers stay common: a counter counts all forwards.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import MutableMapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from streamshard.core.module_state import handle_of
from streamshard.device import generators_of, has_streams, module_of
from streamshard.torch_private import THREAD_STACKS

_PYTHON = SimpleNamespace(get_state=random.getstate, set_state=random.setstate)


def _generators(device: torch.device) -> list[Any]:
    """The random number generators of the host and of the device, Python's, and NumPy's if it is imported."""
    numbers: Any = sys.modules.get("numpy.random")
    if not hasattr(numbers, "set_bit_generator"):
        return [*generators_of(device), _PYTHON]
    # Exchanged as a whole: to copy NumPy's state takes 60 us, in each layer of each micro-batch.
    numpy = SimpleNamespace(get_state=numbers.get_bit_generator, set_state=numbers.set_bit_generator)
    return [*generators_of(device), _PYTHON, numpy]


class ThreadState(NamedTuple):
    """torch's state of the thread.

    Attributes:
        makes_graph: gradients are enabled.
        autocast: for each kind of device, whether autocast is enabled, and its dtype.
        stacks: the saved-tensor hooks, modes of functions and modes of dispatch that are entered, innermost last.
        device: of the model.
        random: states of the `_generators`.
        stream: the device's current one; None on the CPU.
    """

    makes_graph: bool
    autocast: dict[str, tuple[bool, torch.dtype]]
    stacks: tuple[list[Any], ...]
    device: torch.device
    random: list[Any]
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
        for generator, state in zip(_generators(self.device), self.random, strict=False):  # NumPy may have come since
            generator.set_state(state)
        if self.stream is not None:
            module_of(self.device).set_stream(self.stream)


def take_state(device: torch.device) -> ThreadState:
    """The state of this thread, which has no hooks and modes afterwards."""
    kinds = dict.fromkeys(("cpu", device.type))
    autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
    stacks = tuple(stack.take() for stack in THREAD_STACKS)
    numbers = [generator.get_state() for generator in _generators(device)]
    stream = module_of(device).current_stream(device) if has_streams(device) else None
    return ThreadState(torch.is_grad_enabled(), autocast, stacks, device, numbers, stream)


def with_other_numbers(state: ThreadState, count: int) -> Sequence[ThreadState]:
    """`count` states with different random numbers. The first is `state` itself."""
    # Forwards begin together: in one state all would draw the same dropout masks. Derived from the state, numbers
    # repeat with a run's seed. A forward advances one of the generators, or none.
    told = b"".join(
        each.numpy().tobytes() if isinstance(each, torch.Tensor) else pickle.dumps(each) for each in state.random
    )
    seeds = random.Random(told)
    states = [state]
    for seed in (seeds.getrandbits(62) for _ in range(count - 1)):
        fresh = [torch.Generator(generator.device).manual_seed(seed) for generator in generators_of(state.device)]
        numbers: list[Any] = [*(generator.get_state() for generator in fresh), random.Random(seed).getstate()]
        if len(state.random) > len(numbers):
            numbers.append(sys.modules["numpy.random"].MT19937(seed))
        states.append(state._replace(random=numbers))
    return states


# -- attributes of modules ---------------------------------------------------------------------------------------------

_KINDS = (torch.Tensor, list, dict, tuple, type(None))
_OWN = frozenset(vars(nn.Module()))  # attributes of any module, such as ``_parameters``
_DELETED = object()  # the value of an attribute that a forward has deleted

Values = dict[tuple[int, str], Any]  # by the number of a mapping, and the key in it


class Attributes:
    """Attributes of a model's modules that hold tensors.

    Args:
        model: sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._mappings: list[MutableMapping[str, Any]] = []
        self._add(model)
        self._before = self._values()

    def _add(self, module: nn.Module) -> None:
        """Watch `module` and the modules in it, except layers, whose own forwards do not pause."""
        handle = handle_of(module)
        if handle is None or handle.unit is None:
            self._mappings += module.__dict__, module._buffers
            for child in module.children():
                self._add(child)

    def _values(self) -> Values:
        """Of all kinds: a forward may put a tensor where a number was."""
        items = ((number, key, each) for number, mapping in enumerate(self._mappings) for key, each in mapping.items())
        return {(number, key): value for number, key, value in items if key not in _OWN}

    def enter(self, own: Values) -> None:
        """Set the attributes that a forward has set before, `own`. All others are as before the step."""
        as_before = {place: self._before.get(place, _DELETED) for place in self.leave()}
        for (number, key), value in {**as_before, **own}.items():
            if value is _DELETED:
                self._mappings[number].pop(key, None)
            else:
                self._mappings[number][key] = value

    def leave(self) -> Values:
        """The attributes that the forward has set or deleted so far."""
        now = self._values()
        changed = (place for place, value in now.items() if self._before.get(place, _DELETED) is not value)
        return {
            **{place: now[place] for place in changed if isinstance(now[place], _KINDS)},
            **dict.fromkeys(self._before.keys() - now.keys(), _DELETED),
        }

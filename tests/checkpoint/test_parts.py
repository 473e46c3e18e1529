"""What a run is made of besides its tensors."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy
import pytest
import torch

from streamshard.checkpoint import parts
from streamshard.checkpoint.parts import random_state, set_random_state


def _draw() -> list[float]:
    return [random.random(), random.gauss(0.0, 1.0), torch.rand(()).item(), numpy.random.rand(), numpy.random.randn()]


def test_random_numbers_go_on_where_they_were() -> None:
    """Python's, torch's and numpy's, also of those that draw two at a time; twice from one state."""
    _draw()
    state = random_state(torch.device("cpu"))
    wanted = _draw()
    for _ in range(2):
        set_random_state(state, torch.device("cpu"))
        assert _draw() == wanted


def test_a_devices_random_state_is_kept_for_that_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """And left alone by a run on another."""
    given: list[object] = []
    module = SimpleNamespace(
        get_rng_state=lambda device: torch.tensor([5]),
        set_rng_state=lambda state, device: given.append((state, device)),
    )
    monkeypatch.setattr(parts, "module_of", lambda device: module)
    device = torch.device("cuda", 1)
    state = random_state(device)
    assert state["cuda"] == 5
    set_random_state(state, torch.device("cpu"))
    assert not given
    set_random_state(state, device)
    assert given == [(state["cuda"], device)]

"""The dynamic loss scaler for fp16: torch's, with Megatron's hysteresis.

That an overflow in one rank's piece skips the step on all ranks is not done here but where gradients are checked (see
`streamshard.unit.sharded_tensor`), so torch's own scaler is right as well; this one knows plain tensors that the
user put in the place of gradients, too.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from streamshard.device import accelerator
from streamshard.errors import ConfigError
from streamshard.unit.sharded_parameter import end_step

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` that puts up with some overflows before it backs off. Use it in the same way.

    Each overflow skips the step. The scale is backed off from the `hysteresis`-th overflow on; the count starts anew
    whenever the scale has grown, that is after `growth_interval` steps in a row without overflow, and not before
    (Megatron-LM, megatron/core/optimizer/grad_scaler.py, DynamicGradScaler.update: its docstring says "in a row", its
    code does this). With ``hysteresis=1`` the scale is torch's in every step.

    Args:
        device: where the loss is; None is "cuda" if there is a GPU, else "cpu".
        init_scale: the first scale.
        growth_factor: what the scale grows by, above 1.
        backoff_factor: what it is multiplied with after an overflow, between 0 and 1.
        growth_interval: steps in a row without overflow after which it grows.
        enabled: False makes everything a no-op.
        hysteresis: the overflow that backs off, counting from 1.

    Raises:
        ConfigError: a number is out of its range.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        hysteresis: int = 1,
    ) -> None:
        _want_between("init_scale", init_scale, 0.0, math.inf)
        _want_between("growth_factor", growth_factor, 1.0, math.inf)
        _want_between("backoff_factor", backoff_factor, 0.0, 1.0)
        _want_count("growth_interval", growth_interval)
        _want_count("hysteresis", hysteresis)
        if device is None:
            device = accelerator() or "cpu"
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._hysteresis = self._init_hysteresis_tracker = hysteresis
        self._hysteresis_tracker: torch.Tensor | None = None  # [] int32: overflows until one backs off, that one too

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *args: Any) -> dict[torch.device, torch.Tensor]:
        # What torch's unscale_ and step are made of. A step that has failed has left gradients plain.
        end_step([param for group in optimizer.param_groups for param in group["params"]])
        return super()._unscale_grads_(optimizer, *args)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """As torch's. Nothing waits for the device."""
        if not self._enabled or new_scale is not None:
            super().update(new_scale)
            return
        scale, growth = self._check_scale_growth_tracker("update")
        tracker = self._hysteresis_tracker
        assert tracker is not None  # it is made with the scale
        before = scale.clone()
        super().update()
        overflowed = scale < before
        tracker.sub_(overflowed.int()).clamp_(min=0)
        scale.copy_(torch.where(overflowed & (tracker > 0), before, scale))
        tracker.masked_fill_(~overflowed & (growth == 0), self._hysteresis)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with ``hysteresis`` and how much of it is left. torch's own scaler loads it too."""
        state = super().state_dict()
        if self._enabled:
            state.update(hysteresis=self._hysteresis, _hysteresis_tracker=self._get_hysteresis_tracker())
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. The state of torch's own scaler leaves `hysteresis` as it is, with none of it used up."""
        super().load_state_dict(state_dict)
        self._hysteresis = state_dict.get("hysteresis", self._hysteresis)
        self._init_hysteresis_tracker = state_dict.get("_hysteresis_tracker", self._hysteresis)
        if self._hysteresis_tracker is not None:
            self._hysteresis_tracker.fill_(self._init_hysteresis_tracker)

    def __getstate__(self) -> dict[str, Any]:
        tracker = self._get_hysteresis_tracker()
        return {**super().__getstate__(), "_init_hysteresis_tracker": tracker, "_hysteresis_tracker": None}

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._hysteresis_tracker = torch.full((), self._init_hysteresis_tracker, dtype=torch.int32, device=dev)

    def _get_hysteresis_tracker(self) -> int:
        tracker = self._hysteresis_tracker
        return self._init_hysteresis_tracker if tracker is None else int(tracker.item())


def _want_between(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < high:
        raise ConfigError(f"{name}={value!r}: wanted a number between {low:g} and {high:g}, both exclusive")


def _want_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r}: wanted a positive integer")

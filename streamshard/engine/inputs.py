"""Whether ranks may run out of inputs, and what that changes for the engine. They may not, unless there is a `Join`."""

from __future__ import annotations

__all__ = ["Inputs"]


class Inputs:
    """All ranks have inputs. `streamshard.join` puts another one of these in the place of `Engine.inputs` for a while.

    Attributes:
        grad_scale: gradients are multiplied by it before they are reduced.
        buffer_source: number, among all ranks, of the rank whose buffers count.
    """

    grad_scale = 1.0
    buffer_source = 0

    def before_pass(self) -> None:
        """An outermost forward begins. May be collective."""

    def on_clipping(self, max_norm: object, norm_type: float, skip_above: float | None) -> None:
        """``model.clip_grad_norm_`` was called."""

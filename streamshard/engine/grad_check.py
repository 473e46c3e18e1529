"""Whether every gradient on every rank is finite: one collective and one wait of the host per backward, on request."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from streamshard.comm.ranks import Ranks
from streamshard.errors import GradientError
from streamshard.unit.shard import ParamShard

__all__ = ["GradCheck"]

_FOUND = {1: "inf", 2: "nan"}  # by code, 0 is finite; of all ranks' codes the largest counts


class GradCheck:
    """Looks at all gradients after a backward has reduced them. Owns no buffers.

    Args:
        params: in the order in which the first bad one is looked for.
        ranks: its ranks hold the other pieces.
    """

    def __init__(self, params: Sequence[ParamShard], ranks: Ranks) -> None:
        self._params = params
        self._ranks = ranks

    def check(self) -> None:
        """Raise on all ranks if a gradient on any of them is not finite. Compute stream; collective.

        Raises:
            GradientError: names the first such parameter and says what its gradient holds. Gradients stay as they are.
        """
        grads = [(index, shard.param.grad) for index, shard in enumerate(self._params) if shard.local.numel]
        filled = [(index, grad.as_subclass(torch.Tensor)) for index, grad in grads if grad is not None]
        # The maximum norm of finite numbers is finite, an inf or nan among them survives in it.
        peaks = [torch.zeros((), device=self._ranks.streams.device)] * len(self._params)
        if filled:
            norms = torch._foreach_norm([grad for _, grad in filled], math.inf)
            for (index, _), norm in zip(filled, norms, strict=True):
                peaks[index] = norm
        peak = torch.stack(peaks)
        codes = peak.isnan().to(torch.uint8).mul_(2).add_(peak.isinf())
        self._ranks.all_reduce(codes, maximum=True, with_replicas=True)
        bad = [(code, shard.name) for code, shard in zip(codes.tolist(), self._params, strict=True) if code]
        if bad:
            code, name = bad[0]
            raise GradientError(
                f"the gradient of {name!r} holds {_FOUND[code]} after this backward: the first of {len(bad)} such "
                f"gradients, of {len(self._params)} in all. They are left in index: zero_grad() skips the step"
            )

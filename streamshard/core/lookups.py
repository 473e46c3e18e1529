"""The gradient of an embedding, made range by range in its slot.

torch makes it as large as the weight, with a row of zeros for each token that the batch does not have. It would be the
largest tensor of a backward's end. So backward keeps the gradients of the embedding's outputs, one row per token, and
`write_lookups` makes the gradient of one range of rows at a time, by the same kernel: each row has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from streamshard.nested import tensors_in

_RANGES = 8
_NODES = 32  # between the outputs of a layer and its look-ups: sums, norms, dropout


class Lookup(NamedTuple):
    """The gradient of one look-up's output.

    Attributes:
        grad: [..., width] dtype of the weight.
        indices: [...], the rows that were looked up.
        padding: a row without gradient; -1: none.
    """

    grad: torch.Tensor
    indices: torch.Tensor
    padding: int

    def rows(self, first: int, last: int) -> torch.Tensor:
        """[last - first, width], the gradient of these rows of the weight."""
        others = last - first  # one row more, for the tokens outside of the range
        local = self.indices - first
        local = local.masked_fill((local < 0) | (local >= others) | (self.indices == self.padding), others)
        made: torch.Tensor = torch.ops.aten.embedding_dense_backward(self.grad, local, others + 1, others, False)
        return made[:others]


def lookups_in(output: Any) -> Iterator[Any]:
    """The graph nodes of look-ups that `output` was computed from. Nodes farther than a layer are not found."""
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors_in(output)]
    seen = set(nodes)
    for node in nodes:
        if node is None or len(seen) > _NODES:
            continue
        if node.name() == "EmbeddingBackward0":
            if not node._saved_sparse and not node._saved_scale_grad_by_freq:
                yield node
            continue
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                nodes.append(following)


def write_lookups(
    place: torch.Tensor, lookups: list[Lookup], dense: torch.Tensor | None, scale: float, *, adds: bool
) -> None:
    """Write the gradient of a weight into its slot. Frees `lookups`.

    Args:
        place: [rows, width], in the slot.
        lookups: of the weight, in the order of backward.
        dense: [rows, width], the gradient of other uses of the weight, such as a tied head; changed. `place` itself if
            this gradient is there already, scaled.
        scale: multiplies the gradient.
        adds: to the gradient in the slot.
    """
    step = max(1, -(-len(place) // _RANGES))
    for first in range(0, len(place), step):
        part = place[first : first + step]
        total = None if dense is None else dense[first : first + step]
        for lookup in lookups:
            made = lookup.rows(first, first + len(part))
            if dense is place and scale != 1.0:
                made.mul_(scale)
            total = made if total is None else total.add_(made)
        assert total is not None
        if dense is not place:
            if scale != 1.0:
                total.mul_(scale)
            part.add_(total) if adds else part.copy_(total)
        del total, made  # before the next range is made
    lookups.clear()

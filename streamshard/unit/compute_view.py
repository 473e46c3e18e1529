"""Compute views: what layers compute with, and whether a forward has written to them.

A slot goes to another layer, and is gathered anew, so what is written to it would be lost: it raises. Version counters
tell. What is written through ``.data`` leaves no trace in them, so a weight that is asked for it is compared with a
copy: transformers' Gemma 3n clamps there in every forward, and as good as never changes anything.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from streamshard.compiling import skip, untraced
from streamshard.errors import ShardingError

__all__ = ["ComputeView", "Writes"]

_data: Any = torch._C.TensorBase.data


class ComputeView(nn.Parameter):
    """A weight in its slot. See `Writes`."""

    @property
    @skip
    def data(self) -> torch.Tensor:
        """As in torch. What it holds now is remembered until its layer is released."""
        if (watched := _watched.get(self)) is not None and (writes := watched[0]()) is not None:
            untraced(writes.remember, watched[1])
        data: torch.Tensor = _data.__get__(self)
        return data

    @data.setter
    @skip
    def data(self, data: torch.Tensor) -> None:
        if (watched := _watched.get(self)) is not None and data.data_ptr() != self.data_ptr():
            _refuse(watched[2], "was given other memory (param.data = ...)")
        _data.__set__(self, data)

    @skip
    def set_(self, *source: Any) -> torch.Tensor:
        """As in torch. torch's parametrizations, and so PEFT's adapters of experts, set a weight to itself."""
        if len(source) == 1 and isinstance(source[0], torch.Tensor) and source[0].data_ptr() == self.data_ptr():
            return self
        return super().set_(*source)

    def move(self, memory: torch.Tensor) -> None:
        """Lie in `memory`, of the same shape and dtype, from now on."""
        _data.__set__(self, memory)


class Writes:
    """Notices what forwards write to the compute views of one unit."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._views: list[ComputeView] = []
        self._aliases: list[torch.Tensor] = []  # of the same version counters: a view may be absent
        self._versions: list[int] = []
        self._before: dict[int, torch.Tensor] = {}  # of weights that were asked for their .data

    def watch(self, view: ComputeView, alias: torch.Tensor, name: str) -> None:
        """`view` is a weight of the parameter `name`; `alias` has its version counter."""
        _watched[view] = weakref.ref(self), len(self._names), name
        self._names.append(name)
        self._views.append(view)
        self._aliases.append(alias)
        self._versions.append(alias._version)

    def forget(self) -> None:
        """Somebody begins to compute with the views: what was written to them before is not of interest."""
        self._versions = [alias._version for alias in self._aliases]
        if self._before:
            self._before.clear()

    def remember(self, index: int) -> None:
        """Somebody is about to look at, or write to, what `index` holds."""
        if index not in self._before:
            self._before[index] = self._bytes(index).clone()

    def refuse(self) -> None:
        """Somebody has computed with the views.

        Raises:
            ShardingError: one of them was written to; names its parameter.
        """
        seen = self._versions
        if [alias._version for alias in self._aliases] == seen and not self._before:
            return
        now, before = [alias._version for alias in self._aliases], dict(self._before)
        self.forget()
        for index, name in enumerate(self._names):
            if now[index] != seen[index] or index in before and not torch.equal(before[index], self._bytes(index)):
                _refuse(name, "was changed in place")

    def _bytes(self, index: int) -> torch.Tensor:
        """What is compared: NaN is like NaN, 0 is unlike -0."""
        with torch._C.DisableTorchFunctionSubclass():
            flat: torch.Tensor = _data.__get__(self._views[index]).reshape(-1)
        return flat.view(torch.uint8)


# Whose each compute view is: its place there, and the name of its parameter.
_watched: MutableMapping[torch.Tensor, tuple[weakref.ref[Writes], int, str]] = WeakIdKeyDictionary()


def _refuse(name: str, what: str) -> NoReturn:
    raise ShardingError(
        f"parameter {name!r} {what} inside a forward, which computes with a copy of the weights: the change would be "
        "lost. Change weights between steps, on all ranks alike, for example after optimizer.step(), under "
        "torch.no_grad(); make what a forward updates, such as an EMA codebook, a buffer; renormalise the rows of "
        "nn.Embedding(max_norm=...) between steps"
    )

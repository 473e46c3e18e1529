"""The conventions of a model's library: tied weights, initialisation, files. This class has plain PyTorch's.

The conventions of Hugging Face's libraries are in `streamshard.integrations`. `conventions` imports that package by its
name, and only if this process has imported one of these libraries. So a plain PyTorch process never loads it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

Tensors = Mapping[str, torch.Tensor]
"""Tensors by name."""

_LIBRARIES = ("transformers", "diffusers", "peft", "sentence_transformers")
_THEIR_MODULE = "streamshard.integrations.peft"


class ForLoading(NamedTuple):
    """The model's tensors, made from the tensors in files.

    Attributes:
        made: the tensors, by the model's names.
        failed: by the model's names, the reasons for tensors that cannot be made.
        taken: names of the files' tensors that are needed or allowed.
        optional: names of the model's tensors that the files need not have.
    """

    made: dict[str, torch.Tensor]
    failed: dict[str, str]
    taken: set[str]
    optional: set[str]


class Conventions:
    """How a library ties, initialises, names and stores weights. A library overrides the calls that differ.

    `root` and `model` are whole models; modules of a library's class may lie inside.
    """

    # -- sharding -----------------------------------------------------------------------------------------------------

    def tie_weights(self, root: nn.Module) -> None:
        """Tie the weights of a model on the meta device again."""

    def kept_in_fp32(self, root: nn.Module, dtype: torch.dtype | None) -> set[str]:
        """Names of parameters that compute in fp32 although the model computes in `dtype`."""
        return set()

    def embeddings(self, root: nn.Module) -> Iterable[nn.Module]:
        """The input and output embeddings that the library knows."""
        return ()

    def replace_methods(self, root: nn.Module) -> None:
        """Replace methods of modules that need full weights, after `root` was sharded."""

    # -- plans --------------------------------------------------------------------------------------------------------

    def taking_fakes_for_real(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the library's models do with fake tensors what they do with real ones."""
        return contextlib.nullcontext()

    # -- initialisation -----------------------------------------------------------------------------------------------

    def initialise(self, module: nn.Module) -> bool:
        """Let `module` initialise itself and all modules inside. Returns False if the library cannot do it."""
        return False

    def refuse_initialisation(self, model: nn.Module, empty: Collection[str]) -> None:
        """Raise if the library would initialise a parameter named in `empty` with wrong values."""

    # -- files --------------------------------------------------------------------------------------------------------

    def file_stem(self, model: nn.Module) -> str:
        """The stem of the names of weights' files."""
        return "model"

    def left_out(self, model: nn.Module, tied: Sequence[Sequence[str]]) -> set[str]:
        """The names to leave out of files. In `tied`, each group has the names of one tensor."""
        return {name for group in tied for name in group[1:]}

    def rearrange_for_saving(self, model: nn.Module, tensors: Tensors) -> Tensors:
        """The tensors as in files (names, shapes, order), from meta tensors with the model's names and shapes.

        Raises:
            CheckpointError: the library loads no such files.
        """
        return tensors

    def rearrange_for_loading(self, model: nn.Module, stored: Tensors, wanted: Tensors) -> ForLoading:
        """The model's tensors made from the tensors in files.

        Args:
            model: its own tensors are not touched.
            stored: meta tensors by the names in the files.
            wanted: meta tensors of the model's names and shapes.
        """
        return ForLoading({name: stored[name] for name in stored if name in wanted}, {}, set(wanted), set())

    def write_config(self, model: nn.Module, directory: Path, dtype: torch.dtype | None) -> None:
        """Write the files beside the weights, for weights of `dtype`; None leaves the dtype of the config."""


def conventions() -> Conventions:
    """The conventions of the libraries that this process has imported."""
    if not any(library in sys.modules for library in _LIBRARIES):
        return Conventions()
    found: Conventions = importlib.import_module(_THEIR_MODULE).CONVENTIONS
    return found

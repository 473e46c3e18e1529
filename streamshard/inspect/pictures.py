"""Pictures drawn with matplotlib, which users need not have."""

from __future__ import annotations

import os
from typing import Any

from streamshard.errors import ConfigError


def new_figure(width_in: float, height_in: float) -> Any:
    """An empty ``matplotlib.figure.Figure`` of this size in inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib: pip install matplotlib") from error
    return Figure((width_in, height_in), dpi=110, layout="constrained")


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write `figure`. The end of the file's name says the format: .png, .svg, .pdf or another one of matplotlib's.

    Raises:
        ConfigError: matplotlib does not know the format.
    """
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ConfigError(f"the picture {os.fspath(path)!r}: {error}") from error

"""How far the example job is: a bar on a terminal; lines in a file, in a pipe and on a terminal without a cursor."""

from __future__ import annotations

import os
import sys
import time

from tqdm import tqdm

LINE_EVERY_S = 10.0


class Progress:
    """Owns what the job shows on stderr while it trains.

    Args:
        total: steps in all.
        done: steps that were done before.
        is_shown: False on ranks that show nothing.
    """

    def __init__(self, total: int, done: int, is_shown: bool) -> None:
        has_cursor = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._prints_lines = is_shown and not has_cursor
        self._total, self._first, self._done = total, done, done
        self._start = self._last_line = time.monotonic()
        # A narrow terminal cuts off the end, so the loss comes before the speed. On a wide one the bar takes the rest.
        self._bar = tqdm(total=total, initial=done, disable=not (is_shown and has_cursor), ncols=_columns(), nrows=20,
                         bar_format="{n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}")  # fmt: skip

    def step(self) -> None:
        """One more step is done."""
        self._done += 1
        self._bar.ncols = _columns()
        self._bar.update()

    def show(self, state: str) -> None:
        """Show `state` beside the bar, or in a line if the last line is old enough or this step is the last."""
        self._bar.set_postfix_str(state)
        now = time.monotonic()
        if self._prints_lines and (now - self._last_line >= LINE_EVERY_S or self._done == self._total):
            left_s = (now - self._start) / max(self._done - self._first, 1) * (self._total - self._done)
            time_left = tqdm.format_interval(left_s)
            print(f"{self._done}/{self._total}, {time_left} left, {state}", file=sys.stderr, flush=True)
            self._last_line = now

    def write(self, line: str) -> None:
        """Print a line to stdout, above the bar."""
        self._bar.write(line, file=sys.stdout)
        sys.stdout.flush()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


def _columns() -> int:
    """How long a line on stderr may be. tqdm alone shows nothing on a terminal that says 0, not knowing its size."""
    width = os.get_terminal_size(sys.stderr.fileno()).columns if sys.stderr.isatty() else 0
    return (width or 80) - 1  # the last column would begin a new line on some terminals

"""The command line, called in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from streamshard.tools.command import main


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``streamshard`` with these words: what it prints. Errors of usage (code 2) are one line on standard error."""

    def call(*words: object, code: int = 0) -> str:
        assert main([*map(str, words)]) == code, words
        said = capsys.readouterr()
        if code != 2:
            return said.out
        assert said.err.startswith(f"streamshard {words[0]}: ") and said.err.count("\n") == 1
        return said.err

    return call

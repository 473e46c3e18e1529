"""StreamShard: sharded data-parallel training for PyTorch by layer streaming.

`streamshard.api` lists the public names. They are imported when the first one is used: torch takes seconds to
import, and ``streamshard --help`` does not need it.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"  # the packaging reads it here

if TYPE_CHECKING:
    from streamshard.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Import all public names, and with them the submodules, such as ``streamshard.optim``."""
        if name == "__all__" or not name.startswith("__"):
            import streamshard.api as api

            globals().update({each: getattr(api, each) for each in api.__all__}, __all__=api.__all__)
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        import streamshard.api as api

        return sorted({*globals(), *api.__all__})

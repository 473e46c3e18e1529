"""StreamShard: sharded data-parallel training for PyTorch by layer streaming.

`streamshard.public` lists the public names. They are imported when the first one is used: torch takes seconds to
import, and ``streamshard --help`` does not need it.
"""

from typing import TYPE_CHECKING, Any

from streamshard.version import __version__ as __version__

if TYPE_CHECKING:
    from streamshard.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Import all public names, and with them the submodules, such as ``streamshard.optim``."""
        if name == "__all__" or not name.startswith("__"):
            import streamshard.public as public

            globals().update({each: getattr(public, each) for each in public.__all__}, __all__=public.__all__)
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        import streamshard.public as public

        return sorted({*globals(), *public.__all__})

"""StreamShard: sharded data-parallel training for PyTorch by layer streaming.

Each public name is imported when it is first used. So ``from streamshard import StreamShard`` loads the core alone, and
``streamshard --help`` does without torch, which takes seconds to import. ``__init__.pyi`` lists the names, for type
checkers too (Scientific Python's SPEC 1).
"""

import ast
import importlib
from typing import Any

__version__ = "0.1.0"  # the packaging reads it here

_STUB = ast.parse(__spec__.loader.get_data(f"{__path__[0]}/__init__.pyi"))  # `__file__` may be a .pyc
_MODULE_OF = {each.name: node.module for node in _STUB.body if isinstance(node, ast.ImportFrom) for each in node.names}
__all__ = sorted(name for name, module in _MODULE_OF.items() if module != __name__)  # without packages


def __getattr__(name: str) -> Any:
    """Import the module of the public name `name`, or the package of this name, such as ``streamshard.optim``."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _MODULE_OF[name] == __name__:
        return importlib.import_module(f"{__name__}.{name}")
    found = getattr(importlib.import_module(_MODULE_OF[name]), name)
    return globals().setdefault(name, found)  # found without this function from now on


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

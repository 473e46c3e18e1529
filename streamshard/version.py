"""Which StreamShard this is: the packaging reads it here, and so does everything that says it."""

__all__ = ["__version__"]

__version__ = "0.1.0"

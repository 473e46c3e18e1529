"""The version. Imports nothing, so that ``streamshard --version`` does not wait for torch."""

__version__ = "0.1.0"  # the packaging reads it here

"""Instruments for a sharded model: memory, races, an adversary."""

from streamshard.core.module_state import engine_of as engine_inside

__all__ = ["engine_inside"]

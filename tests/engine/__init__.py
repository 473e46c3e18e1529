"""Tests of `streamshard.engine`."""

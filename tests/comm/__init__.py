"""Tests of `streamshard.comm`."""

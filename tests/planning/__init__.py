"""Tests of `streamshard.planning`."""

"""Tests of `streamshard.inspect`."""

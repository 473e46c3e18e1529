"""Tests of `streamshard.core`."""

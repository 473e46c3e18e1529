"""Tests of `streamshard.tools`."""

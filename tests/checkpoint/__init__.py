"""Tests of `streamshard.checkpoint`."""

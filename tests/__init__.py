"""Tests of streamshard."""

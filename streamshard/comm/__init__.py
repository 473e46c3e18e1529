"""Streams, fences, and everything that passes between ranks."""

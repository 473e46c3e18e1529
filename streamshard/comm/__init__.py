"""Streams, fences, and all communication between ranks."""

"""Instruments."""

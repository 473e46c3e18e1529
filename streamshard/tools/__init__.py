"""Instruments: plan, doctor, memory report, trace, race detector, and the command. No core module imports them."""

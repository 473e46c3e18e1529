"""Instruments: plan, doctor, memory report, trace, and the command. No core module imports them."""

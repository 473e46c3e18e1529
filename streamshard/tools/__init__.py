"""Instruments: plan, doctor, memory report, trace, fingerprints, and the command. No core module imports them."""

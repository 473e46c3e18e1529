"""Instruments: plan, doctor, memory report, trace, statistics, races, adversary, and the command. No core module
imports them."""

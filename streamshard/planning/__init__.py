"""Decisions before anything is allocated: units, layout, slots, program, memory. Pure functions, no communication."""

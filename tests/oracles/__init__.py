"""Slow and obvious float64 loops, written from the formulas and not from the library."""

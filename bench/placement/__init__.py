"""Placement solvers beside bounds and an exact solver."""

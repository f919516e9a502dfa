"""Counts of the code itself, and what a request enters."""

"""Requests whose adapters are cold: what waiting for them costs, and what host workers save."""

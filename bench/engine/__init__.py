"""The engine's decode speed beside its peers and the machine's ceiling."""

"""Placement and routing over instances, the adapter pool, the registry, and faults."""

"""The endpoints that look after a running service: adapters, registry, capacity, health."""

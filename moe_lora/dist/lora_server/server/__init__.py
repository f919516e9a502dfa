"""The LoRA Server's ranks: leases, residency, loading, and the data path."""

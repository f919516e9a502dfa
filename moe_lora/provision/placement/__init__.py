"""Which instances serve which adapters, by rank and demand."""

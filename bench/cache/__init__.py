"""The cache's policies, simulated and measured, and its bookkeeping."""

"""The adapter pool: which instances hold which adapters in host memory."""

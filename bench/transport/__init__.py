"""One-sided transports."""

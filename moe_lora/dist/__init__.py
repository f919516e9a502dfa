"""What runs across processes: one-sided transports below, the LoRA Server above."""

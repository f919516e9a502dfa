"""Where a LoRA delta is computed: the LoraBackend interface and its implementations."""

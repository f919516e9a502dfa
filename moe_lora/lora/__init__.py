"""Where a LoRA delta is computed: the LoraBackend interface, and the local backend."""

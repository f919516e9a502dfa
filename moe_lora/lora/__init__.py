"""Where a LoRA delta is computed: the LoraBackend interface, row routing, the local backend."""

"""Processes that work together: transport, the LoRA Server and its clients."""

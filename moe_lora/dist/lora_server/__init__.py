"""The LoRA Server: adapters shared by all instances and computed on ranks of their own."""

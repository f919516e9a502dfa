"""An instance's side of the LoRA Server: its backend, leases and links."""

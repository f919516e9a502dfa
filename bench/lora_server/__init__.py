"""The LoRA Server: overlap, disaggregation on emulated devices, and whether answers stay the same."""

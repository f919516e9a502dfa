"""LoRA, MoE and attention operations: torch reference, CPU library, Triton kernels, registration."""

"""LoRA, MoE and attention operations: torch reference, CPU library, torch.library registration."""

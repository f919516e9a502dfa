"""What instances and the LoRA Server agree on: partition, frames, sessions, control messages."""

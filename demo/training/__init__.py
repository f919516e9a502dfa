"""Training of the demo model: data, the model as plain functions, LoRA, export to the public formats."""

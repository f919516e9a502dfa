"""PEFT's adapter files and configs, read and matched with a model."""

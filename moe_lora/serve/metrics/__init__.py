"""Prometheus metrics: vLLM's names where they exist, our own under moe_lora:."""

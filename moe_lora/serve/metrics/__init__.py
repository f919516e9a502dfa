# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics: vLLM's names where they exist, our own under moe_lora:."""

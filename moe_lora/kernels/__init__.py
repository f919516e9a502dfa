# SPDX-License-Identifier: Apache-2.0
"""LoRA, MoE and attention operations: torch reference, CPU library, Triton kernels, registration."""

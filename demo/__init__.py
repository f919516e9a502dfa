# SPDX-License-Identifier: Apache-2.0
"""The demo: a tiny trained MoE model with many LoRA adapters, and the tasks they answer."""

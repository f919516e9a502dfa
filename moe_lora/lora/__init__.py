# SPDX-License-Identifier: Apache-2.0
"""LoRA deltas: the LoraBackend interface, row routing, the local backend."""

# SPDX-License-Identifier: Apache-2.0
"""The seam of LoRA deltas: the LoraBackend interface, row routing, the local backend."""

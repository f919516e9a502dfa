# SPDX-License-Identifier: Apache-2.0
"""Where a LoRA delta is computed: the LoraBackend interface, row routing, the local backend."""

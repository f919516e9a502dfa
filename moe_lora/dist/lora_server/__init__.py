# SPDX-License-Identifier: Apache-2.0
"""The LoRA Server: shared adapters, computed on separate ranks."""

# SPDX-License-Identifier: Apache-2.0
"""The LoRA Server: adapters shared by all instances, computed on separate ranks."""

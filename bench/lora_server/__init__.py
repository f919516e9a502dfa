# SPDX-License-Identifier: Apache-2.0
"""The LoRA Server: overlap, disaggregation on emulated devices, and whether answers stay the same."""

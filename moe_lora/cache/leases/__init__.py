# SPDX-License-Identifier: Apache-2.0
"""A LoRA Server's leases of adapters, and pages."""

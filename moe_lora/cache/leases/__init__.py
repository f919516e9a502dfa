# SPDX-License-Identifier: Apache-2.0
"""A LoRA Server's leases, and pages."""

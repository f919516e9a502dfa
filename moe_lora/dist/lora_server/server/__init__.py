# SPDX-License-Identifier: Apache-2.0
"""The LoRA Server's ranks: leases, residency, loading, and the data path."""

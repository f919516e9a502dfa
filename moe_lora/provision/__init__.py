# SPDX-License-Identifier: Apache-2.0
"""Hardware for a workload: cache capacity, LoRA Server ranks, instances.  Imports no torch."""

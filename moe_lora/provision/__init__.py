# SPDX-License-Identifier: Apache-2.0
"""How much hardware a workload needs: cache capacity, LoRA Server ranks, instances.  No torch here."""

# SPDX-License-Identifier: Apache-2.0
"""How long things take: steps, stages, host workers, merges."""

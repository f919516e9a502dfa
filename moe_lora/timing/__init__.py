# SPDX-License-Identifier: Apache-2.0
"""Time models: steps, stages, host workers, merges."""

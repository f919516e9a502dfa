# SPDX-License-Identifier: Apache-2.0
"""Which instances serve which adapters, by rank and demand."""

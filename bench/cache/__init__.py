# SPDX-License-Identifier: Apache-2.0
"""The cache's policies, simulated and measured, and its bookkeeping."""

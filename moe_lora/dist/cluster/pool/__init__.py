# SPDX-License-Identifier: Apache-2.0
"""The adapter pool: which instances hold which adapters in host memory."""

# SPDX-License-Identifier: Apache-2.0
"""Decisions for a whole cluster: adapters, placement, capacity."""

# SPDX-License-Identifier: Apache-2.0
"""Placement and routing over instances, the adapter pool, the registry, and faults."""

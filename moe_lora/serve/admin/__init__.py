# SPDX-License-Identifier: Apache-2.0
"""Endpoints for administration: adapters, registry, capacity, health."""

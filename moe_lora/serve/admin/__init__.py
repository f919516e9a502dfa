# SPDX-License-Identifier: Apache-2.0
"""The endpoints that look after a running service: adapters, registry, capacity, health."""

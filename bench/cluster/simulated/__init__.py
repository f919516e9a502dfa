# SPDX-License-Identifier: Apache-2.0
"""Clusters of many servers in the simulator, under every placement and router."""

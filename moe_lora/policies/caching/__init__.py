# SPDX-License-Identifier: Apache-2.0
"""Caching of adapters and KV."""

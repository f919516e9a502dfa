# SPDX-License-Identifier: Apache-2.0
"""Adapters of an engine: versions, places of bytes, and ways to the device."""

# SPDX-License-Identifier: Apache-2.0
"""Adapters of an engine: versions, places of bytes, ways to the device."""

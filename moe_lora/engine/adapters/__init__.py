# SPDX-License-Identifier: Apache-2.0
"""Adapters of an engine: versions, bytes, ways to the device."""

# SPDX-License-Identifier: Apache-2.0
"""The engine's adapters, the places of their bytes, and their ways to the device."""

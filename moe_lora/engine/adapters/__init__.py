# SPDX-License-Identifier: Apache-2.0
"""Which adapters the engine knows, where their bytes lie, and how they get to the device."""

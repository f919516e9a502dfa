# SPDX-License-Identifier: Apache-2.0
"""Merges of an adapter into the weights: decisions and changes."""

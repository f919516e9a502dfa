# SPDX-License-Identifier: Apache-2.0
"""Placement solvers beside bounds and an exact solver."""

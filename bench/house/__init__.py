# SPDX-License-Identifier: Apache-2.0
"""Counts of the code itself, and what a request enters."""

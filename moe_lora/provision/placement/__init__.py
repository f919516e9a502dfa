# SPDX-License-Identifier: Apache-2.0
"""Adapters to instances, by rank and demand."""

# SPDX-License-Identifier: Apache-2.0
"""Popularity of adapters."""

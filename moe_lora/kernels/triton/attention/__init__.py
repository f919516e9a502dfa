# SPDX-License-Identifier: Apache-2.0
"""Paged attention and the writes of K and V."""

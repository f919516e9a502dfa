# SPDX-License-Identifier: Apache-2.0
"""Moves of requests between instances."""

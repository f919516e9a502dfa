# SPDX-License-Identifier: Apache-2.0
"""Requests, with KV, that move between instances."""

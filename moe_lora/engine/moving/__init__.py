# SPDX-License-Identifier: Apache-2.0
"""Requests that move between instances, with their KV."""

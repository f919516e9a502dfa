# SPDX-License-Identifier: Apache-2.0
"""The adapter pool: host-memory copies, divided over instances."""

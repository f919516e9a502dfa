# SPDX-License-Identifier: Apache-2.0
"""Requests whose adapters are cold: what waiting for them costs, and what host workers save."""

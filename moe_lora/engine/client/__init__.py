# SPDX-License-Identifier: Apache-2.0
"""Clients of an engine: one interface, wherever the engine runs."""

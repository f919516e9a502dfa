# SPDX-License-Identifier: Apache-2.0
"""Clients of an engine, in this process or another."""

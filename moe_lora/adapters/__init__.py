# SPDX-License-Identifier: Apache-2.0
"""Adapters: PEFT files, packed true-rank form, the host store, and a registry."""

# SPDX-License-Identifier: Apache-2.0
"""Adapters: PEFT directories read into packed true-rank form, their store in host memory, and a registry."""

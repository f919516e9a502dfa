# SPDX-License-Identifier: Apache-2.0
"""Merging of adapters into the weights."""

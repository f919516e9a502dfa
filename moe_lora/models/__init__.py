# SPDX-License-Identifier: Apache-2.0
"""Decoder models: one layer stack, a specification and a weight map per family."""

# SPDX-License-Identifier: Apache-2.0
"""Decoder models: one layer stack; specification and weight map per family."""

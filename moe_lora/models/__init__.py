# SPDX-License-Identifier: Apache-2.0
"""Decoder models: one layer stack, described per family by a specification and a weight map."""

# SPDX-License-Identifier: Apache-2.0
"""Grammars of answers with tags."""

# SPDX-License-Identifier: Apache-2.0
"""Grammars of answers with tags: any text outside of tags, a grammar inside."""

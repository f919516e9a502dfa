# SPDX-License-Identifier: Apache-2.0
"""Bookkeeping of arena pages: owners, and cached prefixes.  No tensors here."""

# SPDX-License-Identifier: Apache-2.0
"""Bookkeeping of arena pages: who owns them, and which cached prefixes they hold.  No tensors here."""

"""Bookkeeping of arena pages: who owns them, and which cached prefixes they hold.  No tensors here."""

"""Vocabulary shared by all rooms; imports no torch."""

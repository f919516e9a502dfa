"""Decisions without effects: pure functions over read-only views; the caller carries them out."""

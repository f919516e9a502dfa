"""Hostile clients against one front end, beside ordinary ones."""

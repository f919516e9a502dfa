"""Decoder models: one layer stack, described per family by a specification and a weight map."""

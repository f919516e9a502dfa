"""Performance models of a machine, and its operating points."""

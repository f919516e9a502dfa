"""How the rest of the system reaches an engine: one interface, wherever it runs."""

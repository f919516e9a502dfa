"""Programs to start from, over the library."""

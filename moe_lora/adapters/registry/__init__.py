"""The registry: adapters' versions and files, kept safe in SQLite and by content."""

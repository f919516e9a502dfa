"""Which share of requests starts at once, by how many adapters are resident."""

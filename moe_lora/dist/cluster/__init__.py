"""Several engines as one service: which there are, how they fare, and who computes a request."""

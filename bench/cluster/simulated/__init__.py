"""Clusters of many servers in the simulator, under every placement and router."""

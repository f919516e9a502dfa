"""The controller of a cluster of several front ends: what it decides, and how they hear of it."""

"""Roles as processes: on this host, or as ranks of a torchrun job."""

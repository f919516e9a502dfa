"""Provisioning: solver, estimator, plans beside the paper's, performance models."""

# SPDX-License-Identifier: Apache-2.0
"""Provisioning: solver, estimator, plans beside the paper's, performance models."""

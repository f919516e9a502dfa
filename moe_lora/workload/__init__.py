# SPDX-License-Identifier: Apache-2.0
"""Workloads: traces, arrivals, adapter popularity, and replay plans."""

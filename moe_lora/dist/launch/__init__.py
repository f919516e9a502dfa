# SPDX-License-Identifier: Apache-2.0
"""Roles as processes: on this host, or as ranks of a torchrun job."""

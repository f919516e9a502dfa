# SPDX-License-Identifier: Apache-2.0
"""Roles as processes of this host, or of a torchrun job."""

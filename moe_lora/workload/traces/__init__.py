# SPDX-License-Identifier: Apache-2.0
"""Trace files, read as streams."""

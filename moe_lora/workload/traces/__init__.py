# SPDX-License-Identifier: Apache-2.0
"""Trace files of all known formats, read as streams of one kind of record."""

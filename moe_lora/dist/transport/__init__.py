# SPDX-License-Identifier: Apache-2.0
"""One-sided transports: windows of memory that peers write, and signals that count up."""

from .contract import KINDS, RemoteWindow, Transport, Window, make_transport

__all__ = ["KINDS", "RemoteWindow", "Transport", "Window", "make_transport"]

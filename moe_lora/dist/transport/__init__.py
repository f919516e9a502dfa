# SPDX-License-Identifier: Apache-2.0
"""One-sided transports: windows of memory, and counting signals."""

from .contract import KINDS, RemoteWindow, Transport, Window, make_transport

__all__ = ["KINDS", "RemoteWindow", "Transport", "Window", "make_transport"]

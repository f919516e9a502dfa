"""One-sided transports: windows of memory that peers write, and signals that count up."""

from .contract import RemoteWindow, Store, Transport, Window
from .make import KINDS, make_transport

__all__ = ["KINDS", "RemoteWindow", "Store", "Transport", "Window", "make_transport"]

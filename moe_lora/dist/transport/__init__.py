"""One-sided transports: windows of memory that peers write, and signals that count up."""

from .contract import RemoteWindow, Store, Transport, Window
from .make import make_transport

__all__ = ["RemoteWindow", "Store", "Transport", "Window", "make_transport"]

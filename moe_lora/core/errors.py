"""Errors a user can cause or meet. Each message says what was given, what is allowed, and what to do.

Invariants of the program itself are `assert`s, never one of these.
"""

from __future__ import annotations


class MoeLoraError(Exception):
    """Any error that moe_lora raises on purpose."""


class ConfigError(MoeLoraError, ValueError):
    """A setting, command option or config file that cannot be used."""


class AdapterError(MoeLoraError, ValueError):
    """An adapter that cannot be loaded as it is; names the file and the key."""


class AdapterNotFoundError(MoeLoraError, KeyError):
    """No adapter (or no such version of it) is registered under this name."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class AdapterExistsError(MoeLoraError, ValueError):
    """The adapter name is taken already."""


class CapacityError(MoeLoraError, RuntimeError):
    """The request can never fit: pages, slots or tokens asked for exceed what there is in all."""

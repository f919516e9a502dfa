# SPDX-License-Identifier: Apache-2.0
"""A discrete-event simulator: the real policies and caches on a virtual clock.  Imports no torch."""

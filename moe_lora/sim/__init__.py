# SPDX-License-Identifier: Apache-2.0
"""A discrete-event simulator of the real policies and caches, without torch."""

# SPDX-License-Identifier: Apache-2.0
"""The engine's decode speed beside its peers and the machine's ceiling."""

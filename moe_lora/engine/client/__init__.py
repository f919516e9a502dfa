# SPDX-License-Identifier: Apache-2.0
"""How the rest of the system reaches an engine: one interface, wherever it runs."""

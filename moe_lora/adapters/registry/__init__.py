# SPDX-License-Identifier: Apache-2.0
"""The registry: adapters' versions in SQLite, and files by content."""

# SPDX-License-Identifier: Apache-2.0
"""The registry: adapters' versions and files, kept safe in SQLite and by content."""

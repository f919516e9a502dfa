# SPDX-License-Identifier: Apache-2.0
"""Control messages between processes: connections, calls and their encoding."""

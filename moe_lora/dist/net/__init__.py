# SPDX-License-Identifier: Apache-2.0
"""Control messages between the processes of a system: connections, calls and what they carry."""

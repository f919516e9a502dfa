# SPDX-License-Identifier: Apache-2.0
"""Publication of trainers' adapters to a running server."""

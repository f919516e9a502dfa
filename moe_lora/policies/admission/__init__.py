# SPDX-License-Identifier: Apache-2.0
"""Which requests start, and whose adapter gets a place."""

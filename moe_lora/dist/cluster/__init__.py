# SPDX-License-Identifier: Apache-2.0
"""Several engines as one service."""

# SPDX-License-Identifier: Apache-2.0
"""Several engines as one service: which there are, how they fare, and who computes a request."""

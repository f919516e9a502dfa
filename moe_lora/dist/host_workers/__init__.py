# SPDX-License-Identifier: Apache-2.0
"""Host workers: processes that compute deltas during loads."""

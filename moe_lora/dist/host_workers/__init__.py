# SPDX-License-Identifier: Apache-2.0
"""Host workers: processes that compute deltas of adapters during their load."""

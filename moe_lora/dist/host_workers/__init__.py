# SPDX-License-Identifier: Apache-2.0
"""The host backend: processes of this host that compute deltas of adapters during their load."""

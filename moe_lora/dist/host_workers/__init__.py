# SPDX-License-Identifier: Apache-2.0
"""The host backend: processes of this host that compute the deltas of adapters that are still loading."""

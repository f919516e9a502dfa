# SPDX-License-Identifier: Apache-2.0
"""One instance: continuous batching over paged KV."""

# SPDX-License-Identifier: Apache-2.0
"""What the cache of adapters and KV keeps."""

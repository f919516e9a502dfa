# SPDX-License-Identifier: Apache-2.0
"""Start of requests, and adapters' places."""

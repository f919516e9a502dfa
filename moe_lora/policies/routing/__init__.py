# SPDX-License-Identifier: Apache-2.0
"""Which instance gets a request."""

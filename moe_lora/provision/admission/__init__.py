# SPDX-License-Identifier: Apache-2.0
"""Share of requests with an immediate start, by the number of resident adapters."""

# SPDX-License-Identifier: Apache-2.0
"""Which adapter each request asks for: shapes of popularity, by name, or from what a trace tells."""

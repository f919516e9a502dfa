# SPDX-License-Identifier: Apache-2.0
"""Which share of requests starts at once, by how many adapters are resident."""

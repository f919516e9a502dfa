# SPDX-License-Identifier: Apache-2.0
"""What is asked of a server: traces, arrivals, adapter popularity, and the plan made of them."""

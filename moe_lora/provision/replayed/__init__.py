# SPDX-License-Identifier: Apache-2.0
"""The fast model of a cluster that the search of a plan replays."""

# SPDX-License-Identifier: Apache-2.0
"""The fast cluster model behind the search of a plan."""

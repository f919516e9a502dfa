# SPDX-License-Identifier: Apache-2.0
"""The simulator: its speed, and its agreement with recorded runs."""

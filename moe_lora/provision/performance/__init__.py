# SPDX-License-Identifier: Apache-2.0
"""Performance models of a machine, and operating points."""

# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of the project, without torch."""

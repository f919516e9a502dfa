# SPDX-License-Identifier: Apache-2.0
"""What needs a GPU: a first run that decides how to go on, a check of everything, a smoke of the engine."""

# SPDX-License-Identifier: Apache-2.0
"""The processes of one instance: their parts of the model, and their common step."""

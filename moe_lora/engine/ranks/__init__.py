# SPDX-License-Identifier: Apache-2.0
"""The processes of one instance: parts of the model, and a common step."""

# SPDX-License-Identifier: Apache-2.0
"""The processes of one instance, with parts of the model."""

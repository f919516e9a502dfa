# SPDX-License-Identifier: Apache-2.0
"""Linear layers of the base model: experts, quantised weights."""

# SPDX-License-Identifier: Apache-2.0
"""Training of the demo model: data, the model as plain functions, LoRA, export to the public formats."""

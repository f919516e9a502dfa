# SPDX-License-Identifier: Apache-2.0
"""Endpoints for generation, in OpenAI's formats."""

# SPDX-License-Identifier: Apache-2.0
"""The endpoints that generate, in OpenAI's forms."""

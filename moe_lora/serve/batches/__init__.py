# SPDX-License-Identifier: Apache-2.0
"""OpenAI's batches of requests."""

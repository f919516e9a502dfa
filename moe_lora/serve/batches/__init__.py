# SPDX-License-Identifier: Apache-2.0
"""OpenAI's batches: files of requests, and files of results."""

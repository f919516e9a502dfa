# SPDX-License-Identifier: Apache-2.0
"""Text at a front end: tokenizer files, chat templates, streaming text."""

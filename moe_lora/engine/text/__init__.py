# SPDX-License-Identifier: Apache-2.0
"""Text at an engine's front end: tokenizer files, chat templates, streaming text."""

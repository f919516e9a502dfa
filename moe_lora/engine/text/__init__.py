"""Text at an engine's front end: tokenizer files, chat templates, streaming text."""

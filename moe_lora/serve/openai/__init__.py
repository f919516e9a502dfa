"""The endpoints that generate, in OpenAI's forms."""

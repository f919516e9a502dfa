"""The vocabulary of the project, without torch."""

"""The simulator: its speed, and its agreement with recorded runs."""

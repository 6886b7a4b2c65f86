"""The measure `tasks`."""

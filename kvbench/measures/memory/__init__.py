"""The measure `memory`."""

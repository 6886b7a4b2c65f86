"""The measure `needle`."""

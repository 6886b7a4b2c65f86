"""The measure `latency`."""

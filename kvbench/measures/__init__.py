"""The measures. Each is a generator of findings; none knows another."""

"""The measure `fidelity`."""

"""Planning sweeps, the jobs of a sweep, and what became of their cells. Only `job` imports torch."""

"""Cells and sweeps: what is planned, who is at it, what is done. Only `job` imports torch."""

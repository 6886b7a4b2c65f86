"""Checkpoints: where they lie, what their configs say, loading and converting them."""

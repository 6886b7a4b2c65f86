"""Checkpoints: finding, checking, loading and converting them, and what their configs say."""

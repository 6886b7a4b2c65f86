"""Advice and summary: what the rows support, in sentences."""

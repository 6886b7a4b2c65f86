"""Texts, prompts and task sets."""

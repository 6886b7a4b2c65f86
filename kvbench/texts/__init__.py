"""Texts, prompts and task sets: what is read and what is asked."""

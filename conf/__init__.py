"""Hydra's config groups, as package data: `config_path="pkg://kvbench.conf"`."""

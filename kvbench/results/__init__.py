"""Rows, run folders, claims and statuses: everything that lies on disk. Imports no torch."""

"""The command line and the small commands: fetch, plan, status. Imports no torch at the top of any module."""

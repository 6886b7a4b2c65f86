"""Tables of the report, for a page, a terminal and files."""

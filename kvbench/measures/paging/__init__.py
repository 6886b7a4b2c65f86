"""The measure `paging`."""

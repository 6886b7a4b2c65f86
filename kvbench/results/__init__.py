"""Everything on disk: rows, run folders, claims, statuses, the ledger of cells. Imports no torch."""

"""The cache engine: a transformers Cache whose layers hold slots, and the attention that reads them in place."""

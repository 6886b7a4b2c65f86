"""The measure `perplexity`."""

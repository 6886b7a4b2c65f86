"""Attention over stored keys and values: the parts a store is made of, and the kernels that read them."""

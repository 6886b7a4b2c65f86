"""Identities that must hold on the machine at hand, before a model, a GPU or a method is trusted."""

"""Families of KV-cache compression at equal memory: one small reference a method, in PyTorch."""

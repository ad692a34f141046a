"""Families of KV-cache compression at equal memory: one small PyTorch reference per method."""

"""Measures what an episode's cache keeps of a conversation, in plain transformers: see ``__main__.py``."""

"""What an episode's cache keeps of a conversation, measured in plain transformers: see ``__main__.py``."""

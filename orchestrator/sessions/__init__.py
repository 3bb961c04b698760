"""Conversations: their text, and how long their KV is kept."""

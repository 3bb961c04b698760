"""Conversations: what was said, and how long their KV is kept."""

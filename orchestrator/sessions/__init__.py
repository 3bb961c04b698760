"""Conversations: what was said, and for how long their KV is kept."""

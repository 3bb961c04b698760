"""Conversations: their text, and the retention of their KV."""

"""Tokens and money as budgets, per run, key and month, and the books of what was spent (DL-25)."""

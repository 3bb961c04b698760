"""What is written down of every request that ended."""

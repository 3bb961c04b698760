"""Scripts that need nothing of ours: ``tritonclient`` alone, on the plain contract."""

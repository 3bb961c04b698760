"""What waits: pure, no clock."""

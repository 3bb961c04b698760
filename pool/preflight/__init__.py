"""What the machine must have."""

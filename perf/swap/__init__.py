"""What it takes to give a worker another model."""

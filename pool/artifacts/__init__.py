"""Models on this machine: staged, verified, registered, found."""

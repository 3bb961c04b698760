"""Where a Triton server is found, and how it is started."""

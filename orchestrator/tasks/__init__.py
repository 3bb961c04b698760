"""A request as one object, and its records."""

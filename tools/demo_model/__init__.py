"""Code that made the demo checkpoint; it is only in the repository, in no wheel and no image."""

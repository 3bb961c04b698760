"""What is measured of Tidegate, and how: README.md beside this says what is where."""

SEED = 20240229
"""Of everything that is drawn."""

"""A pool: its specs, its units on this machine, its folder, and whom it tells of them."""

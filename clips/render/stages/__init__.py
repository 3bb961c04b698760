"""Providers of the four stages. ``base`` defines what a provider is; ``providers`` lists them."""

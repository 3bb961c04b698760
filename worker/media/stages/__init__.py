"""Providers of the four stages. ``base`` says what a provider is; ``providers`` names them."""

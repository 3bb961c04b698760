"""How the demo checkpoint was made. In the repository only: no wheel and no image has it."""

"""Rivals on the same step costs: schedulers rebuilt from papers and public code.

``fleet`` runs them, ``policies`` has them. Each gets what it has not got in real life: one queue
for all instances that it sees without delay, and pauses that cost nothing. Their clients hang up at
their deadline.
"""

"""Rival schedulers, reimplemented from papers and public code, on the same step costs.

``policies`` has the schedulers, ``fleet`` runs them. Each gets two advantages over real life: one
queue for all instances, visible without delay, and free preemption. Their clients hang up at their
deadline.
"""

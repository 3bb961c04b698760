"""What this machine has: the state directory, models and engines that are registered there.

Read by the service, written by ``pool``; imports neither. ``atomic``, ``errors``, ``hosts`` and
``paths`` need the standard library alone, since set-up uses them before anything is installed.
"""

"""This machine's state directory, and the models and engines that are registered there.

The service reads it and ``pool`` writes it; it imports neither. ``atomic``, ``errors``, ``hosts``
and ``paths`` need only the standard library, because setup uses them before anything is installed.
"""

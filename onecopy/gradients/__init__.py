"""Attached mode: gradients are reduced to their owners while backward runs.

Read in this order: reducer, hooks, norms, join, attachment.
"""

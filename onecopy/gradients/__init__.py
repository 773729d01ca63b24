"""Attached mode: gradients are reduced to their owners while backward runs.

Read in this order: reducer, join, hooks, norms, attachment.
"""

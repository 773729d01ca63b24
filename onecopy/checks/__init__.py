"""Checks: are gradients averaged, do the ranks hold the same, and do bits change between steps?

Read in this order: replica_check, corruption_check.
"""

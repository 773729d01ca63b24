"""Checks: are gradients averaged, do the ranks hold the same, and do bits change between steps?

Read in this order: gradient_check, replica_check, corruption_check.
"""

"""What this rank owns and updates, and the all-gather that brings the updates to all ranks.

Read in this order: engine, inner, sharded_params.
"""

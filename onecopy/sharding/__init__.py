"""What this rank owns and updates, and the all-gather that brings the updates to all ranks.

Read in this order: owned, buffers, inner, all_gather, parameter_changes, fingerprints, same_order,
sharded_params.
"""

"""What this rank owns and updates, and the all-gather that brings the updates to all ranks.

Read in this order: owned, engine, inner, fingerprints, parameter_names,
parameter_changes, sharded_params.
"""

"""The optimizer state in checkpoints: one full dict, DCP, or the directory that ``save`` writes.

Read in this order: state, full_state, safe_pickle, metadata, files, save, load, dcp.
"""

"""Used before and after a training: estimate, baselines, pages, command line.

Read in this order: models, model_spec, baselines, estimate, pages, cli.
"""

"""What runs before and after a training: estimate, baselines, the command line, pages.

No other folder imports this one; ``onecopy.estimate`` and ``python -m onecopy`` lead here. Read in
this order: models, baselines, estimate, pages, cli.
"""

"""Communication among the ranks of one optimizer. No other folder calls a collective.

Read in this order: waiting, agreement, monitor, stats, group, transfer,
interface, c10d; then ``gloo`` for the path of bytes between CPU ranks.
"""

"""Pure planning: who owns which elements, what an optimizer class needs, what a param group says.

Knows no process group, no live optimizer and no memory. Read in this order: text, layout, traits,
plan, sizes, param_groups.
"""

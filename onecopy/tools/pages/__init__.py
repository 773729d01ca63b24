"""Self-contained HTML pages of a plan and of a traced run.

Read in this order: charts, plan_page, run_page.
"""

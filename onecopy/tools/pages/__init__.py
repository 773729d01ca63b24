"""Self-contained HTML pages of a plan and of a traced run: markup, one style sheet, one script.

Read in this order: charts, plan_page, run_page.
"""

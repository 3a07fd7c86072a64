"""Runs as pages: one HTML file each, which needs nothing else.

Nothing is imported here, so that a run without a page needs neither plotly nor jinja2.
"""

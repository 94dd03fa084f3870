"""The report of a run: one HTML file that needs no server, no account and no network. See docs/report.md."""

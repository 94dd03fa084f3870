"""`verl-like selfcheck`: value and gradient of the user's objective against the plain model, row by row.

material.py: the rows. driver.py: what the loop's driver makes of them. plain.py, plain_loss.py, plain_correction.py:
the yardstick, which shares no code with what it checks. work.py: all that is prepared. check.py: the engine's ways.
report.py: the table. tiny.py: a model where none is given.
"""

"""Pictures of the chapters: functions from plain data to matplotlib figures, and `show`, which displays them."""

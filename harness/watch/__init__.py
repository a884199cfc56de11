"""What happened and how fast: the step's clock, the machine's sensors, and everything a run writes
or prints.
"""

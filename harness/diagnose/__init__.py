"""What bounds training, found by running its parts one without the other: nothing is trained, a
minute at most.
"""

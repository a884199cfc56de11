"""The process itself: who it is, what it may use, where it writes, how it ends."""

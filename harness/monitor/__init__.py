"""The monitor reads the machine's sensors, writes the run's logs and prints to the console."""

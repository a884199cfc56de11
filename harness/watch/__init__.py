"""What happened and how fast: the step's clock, the machine's sensors, what a run writes."""

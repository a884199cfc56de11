"""The feed orders samples, loads batches and copies them to the device ahead of the step."""

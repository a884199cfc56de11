"""What a trained network is used for: predictions, a file that others run, a loop of one's own."""

"""``wellfed compare`` shows runs side by side."""

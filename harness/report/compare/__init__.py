"""``wellfed compare`` sets runs side by side."""

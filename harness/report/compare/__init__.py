"""``wellfed compare``: runs set side by side, by what they left in their folders."""

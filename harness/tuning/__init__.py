"""The loader's settings, measured before training instead of guessed."""

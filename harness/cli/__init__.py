"""Composes the settings from the command line, runs the job and reports errors."""

"""The command line composes the settings, runs the job and reports errors."""

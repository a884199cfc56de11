"""The command line: settings, jobs, and what is said of errors."""

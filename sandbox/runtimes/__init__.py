"""The languages: argv, environment and mounts of each. Pure."""

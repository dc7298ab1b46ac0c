"""Core on virtual time: what a machine holds, and which policy to run, without the machine."""

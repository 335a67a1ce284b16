"""Measurements of the method on the embedded backbone; each module is a command."""

"""The reading end of hand-offs: another worker computes a prompt and pushes its KV to this host, from where it is copied."""

"""Copies of blocks at several store nodes: made on request, by heat, and when a node leaves."""

"""Tool calls in what models write: one small parser per family of models."""

"""The whole cluster in one picture, for ``moonpool top`` and the console: asked for by ``poll``, drawn by ``picture``."""

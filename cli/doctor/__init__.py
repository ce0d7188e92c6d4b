"""``moonpool doctor``, one file for each kind of check."""

from moonpool.cli.doctor.command import doctor

__all__ = ["doctor"]

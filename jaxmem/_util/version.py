"""The version of jaxmem, recorded in reports and cached results."""

__version__ = "0.1.0"

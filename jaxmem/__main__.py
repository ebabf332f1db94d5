"""`python -m jaxmem` is the command `jaxmem`."""

from jaxmem.cli import main

if __name__ == "__main__":
    main()

"""What the compiler says: reports as data, and what is derived from them.

`report` is the data, `memory` compiles a program and fills it in, `lints` and `advice` read it;
`compare` and `changes` compare several reports.  Their display is in `jaxmem.show`.
"""

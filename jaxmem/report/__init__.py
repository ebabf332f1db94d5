"""What the compiler says: reports as data, and what is derived from them.

`report` is the data, `memory` compiles a program, `figures` makes a report of it, `lints` and
`advice` read that;
`compare` and `changes` compare several reports.  Their display is in `jaxmem.show`.
"""

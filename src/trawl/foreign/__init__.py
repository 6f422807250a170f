"""Private names of other libraries, which other modules get here under names of Trawl's own.

Each has a sentence that says what it is for and what the public way lacks, and a test in
``tests/foreign`` that fails if the name vanishes or changes its meaning. A name is bound when its
module is imported: hot code calls what the library has, and nothing in between.
"""

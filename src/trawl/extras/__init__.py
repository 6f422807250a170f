"""Extras, which collectors do without: command, clusters, reports, evaluation, formats, JAX.

Nothing else imports this package. Public modules, such as ``trawl.collectors``, have its names in
their stubs, and import each when it is first used. Kinds of environments, formats of datasets and
sinks are found by their names in a registry.
"""

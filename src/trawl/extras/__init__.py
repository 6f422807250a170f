"""What is built upon collectors, which do without it: command, reports, evaluation, tuning.

Nothing else imports this package. Public modules, such as ``trawl.collectors``, look up its names
when they are first used.
"""

"""``kvq eval``: methods compared on one model, through running servers.

Data flows one way: a *spec* names a method and its flags, *servers* runs it, *client* talks to it, *tasks* measure,
*store* keeps each (method, task) as it comes, *report* makes the JSON, Markdown and plots from the store.
"""

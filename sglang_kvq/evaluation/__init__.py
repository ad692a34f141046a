"""``kvq eval``: compares methods on one model, through running servers.

Data flows one way. A *spec* names a method and its flags, *servers* runs it, *client* talks to it, and *tasks* measure.
*store* keeps each (method, task) when it is measured, and *report* makes JSON, Markdown and plots from the store.
"""

from sgl_kernel import __getattr__  # noqa: F401  (a submodule that SGLang imports from unconditionally)

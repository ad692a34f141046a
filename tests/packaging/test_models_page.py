"""docs/results/models.md equals the output of docs/models.py."""

import importlib.util

from tests.conftest import ROOT


def test_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("models_page", ROOT / "docs" / "models.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text()
    assert script.written() == page, "run `python docs/models.py`"
    assert page.count("`Qwen3ForCausalLM`") == 1 and "### Sliding windows in some layers" in page

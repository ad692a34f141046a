"""Every place in the installed SGLang that plans a batch, and every switch that may change it, has been reviewed."""

from argparse import ArgumentParser

import pytest

from sglang_kvq.sglang import checks, compat
from tests.sglang.attention import plan_users_reviewed as reviewed
from tests.sglang.attention.plan_users import Plan, flags, plans, variables
from tests.sglang.memory.pool_users_reviewed import NOT_SERVED
from tests.sglang.memory.test_pool_users import source  # noqa: F401  (a fixture)

ENTER = "read the code there; refuse it in checks.py, or say why it is harmless in plan_users_reviewed.py"


@pytest.fixture(scope="module")
def found(source) -> list[Plan]:  # noqa: F811
    return plans(source, tuple(NOT_SERVED), reviewed.ALSO)


def unreviewed(found: list[Plan]) -> list[Plan]:
    return [plan for plan in found if plan.what not in reviewed.PLANS.get(plan.path, ("", ""))[0].split(", ")]


def test_every_plan_is_reviewed(found):
    assert len(found) >= 10  # with fewer, the reader no longer understands the source
    texts = [f"{plan.path}:{plan.line} plans a batch in {plan.what}" for plan in unreviewed(found)]
    assert not texts, f"SGLang {compat.sglang_version()}, {ENTER}:\n" + "\n".join(texts)


def test_every_variable_is_reviewed(source, found):  # noqa: F811
    names = variables(source, {plan.path for plan in found})
    assert len(names) >= 20
    new = names - {name for group in reviewed.VARIABLES.values() for name in group}
    assert not new, f"SGLang {compat.sglang_version()}, {ENTER}: {sorted(new)}"


def test_every_flag_is_reviewed(applied):
    from sglang.srt.server_args import ServerArgs

    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    names = flags(action.dest for action in parser._actions)
    assert len(names) >= 10
    new = names - {name for group in reviewed.FLAGS.values() for name in group}
    assert not new, f"SGLang {compat.sglang_version()}, {ENTER}: {sorted(new)}"


def test_what_captures_a_plan_is_refused():
    refused = {name for name, _, _ in checks.REFUSED_ENVIRONMENT}
    assert set(reviewed.REFUSED) <= refused


def test_every_entry_says_why():
    assert all(what and why for what, why in reviewed.PLANS.values())
    assert all(why and names for table in (reviewed.VARIABLES, reviewed.FLAGS) for why, names in table.items())


# -- the reader itself -------------------------------------------------------------------------------------------------

SOURCE = """
def load(self, batch):
    self.attn_backend.init_forward_metadata_out_graph(batch)

class Glue:
    def capture(self, backend, batch):
        def once():
            backend.init_forward_metadata_in_graph(batch)
        plan = getattr(backend, "init_forward_metadata")
        if envs.SGLANG_NEW_SWITCH.get() or get_bool_env_var("SGLANG_OTHER"):
            self.record(backend.init_forward_metadata_out_graph)
"""
ENVIRON = """
class Envs:
    # Records the attention metadata once and
    # replays it.
    SGLANG_FAST = EnvBool(False)
    SGLANG_SLOW = EnvBool(False)
    SGLANG_STEP_GLUE = EnvBool(False)
    SGLANG_PLANET = EnvStr("")
"""


def test_the_reader_sees_every_way_to_plan(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "one.py").write_text(SOURCE)
    found = plans(tmp_path, ())
    assert [(plan.what, plan.line) for plan in found] == [
        ("capture: init_forward_metadata?", 9),
        ("capture: init_forward_metadata_out_graph", 11),
        ("load: init_forward_metadata_out_graph", 3),
        ("once: init_forward_metadata_in_graph", 8),
    ]
    assert plans(tmp_path, ("models/",)) == [] and plans(tmp_path, ("models/",), ["models/one.py"]) == found
    assert unreviewed(found) == found


def test_the_reader_sees_every_switch(tmp_path):
    (tmp_path / "one.py").write_text(SOURCE)
    (tmp_path / "environ.py").write_text(ENVIRON)
    names = variables(tmp_path, ["one.py"])
    assert names == {"SGLANG_NEW_SWITCH", "SGLANG_OTHER", "SGLANG_FAST", "SGLANG_STEP_GLUE"}
    assert flags(["cuda_graph_bs", "replay_plans", "plan_early", "port"]) == {
        "cuda_graph_bs",
        "replay_plans",
        "plan_early",
    }
